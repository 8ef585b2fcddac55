"""The part of the package build that pyproject.toml cannot state: one optional shared library.

It has a C interface and is loaded with ctypes, so that nothing of torch or Python is compiled in.
Where it cannot be built the installation goes on without it, and says so.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

from k3tune_kernels.cpu import build as cpu_build

_NAME = "k3tune_kernels.cpu.libk3tune_cpu"


class BuildLibrary(build_ext):
    """Builds the library where setuptools wants an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain name: the file belongs to no version of Python."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not; never raise."""
        try:
            cpu_build.build(Path(self.get_ext_fullpath(ext.name)))
        except (cpu_build.BuildError, OSError) as error:
            self.warn(f"the CPU kernels are left out, the reference runs instead: {error}")


setup(
    ext_modules=[Extension(_NAME, sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibrary},
)
