"""Build the shared library of the CPU kernels: ``python -m k3tune_kernels.cpu.build``.

Standard library only: the package build runs this where nothing is installed. A C++17 compiler
(``$CXX``, c++, g++ or clang++) is all it takes; the library holds the code of every instruction set
and chooses at run time, so it runs on any CPU of the architecture it was built for.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = Path(__file__).with_name("libk3tune_cpu.so")

_COMPILERS = ("c++", "g++", "clang++")
# No -march: each file names the instruction sets of its functions. Contraction is what turns a
# product and a sum into one FMA. gcc 12's own AVX-512 header reads variables it never set.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-pthread",
    "-Wno-psabi",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


def source_digest() -> str:
    """Digest of the sources; a library tells which ones it was built from."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The command of a C++ compiler.

    Raises:
        BuildError: if there is none, or the platform has no port.
    """
    if sys.platform != "linux":
        raise BuildError(f"the CPU kernels are built on Linux only, this is {sys.platform}")
    if asked := os.environ.get("CXX", "").split():
        if shutil.which(asked[0]) is None:
            raise BuildError(f"CXX is {asked[0]}, and there is no such program")
        return asked
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)}, then CXX)")
    return [found]


def build(target: Path = LIBRARY, extra_flags: Sequence[str] = ()) -> Path:
    """Compile the library.

    Args:
        target: the file to write; replaced in one step, so that a process which has the old one
            loaded keeps it.
        extra_flags: further flags, as for a sanitizer.

    Returns:
        ``target``.

    Raises:
        BuildError: with the end of the compiler's output, if it fails.
    """
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        digest = f'-DK3_SOURCE_DIGEST="{source_digest()}"'
        files = sorted(map(str, SOURCES.glob("*.cpp")))
        command = [*compiler, *_FLAGS, *extra_flags, digest, *files, "-o", str(made)]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise BuildError(f"{compiler[0]} cannot be run: {error}") from error
        if result.returncode:
            output = (result.stdout + result.stderr)[-2000:]
            raise BuildError(f"{compiler[0]} ended with status {result.returncode}:\n{output}")
        made.replace(target)
    return target


def main() -> int:
    """Build in place; 1 and one message where that is impossible."""
    try:
        built = build()
    except BuildError as error:
        print(
            f"CPU kernels not built ({platform.machine()}): {error}\n"
            "Everything works without them, on the slower reference.",
            file=sys.stderr,
        )
        return 1
    print(f"built {built.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
