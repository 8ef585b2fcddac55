"""Building and loading the shared library: what happens where that fails, and under sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3tune_kernels.cpu import build, library

COMPILER = shutil.which("g++")


@pytest.fixture
def fresh(monkeypatch):
    """Forgets whether the library was found, now and afterwards."""

    def forget() -> None:
        library.obstacle.cache_clear()
        library.load.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


def run_build(**environment: str) -> subprocess.CompletedProcess[str]:
    """The module's command line in a copy of the package, so that nothing is overwritten."""
    return subprocess.run(
        [sys.executable, "-m", "k3tune_kernels.cpu.build"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def package(tmp_path):
    """A copy of the package without a library, as the place to import it from."""
    source = Path(build.__file__).parents[1]
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / "k3tune_kernels", ignore=skipped)
    return tmp_path


def test_no_compiler_is_one_message_and_no_library(package):
    result = run_build(PYTHONPATH=str(package), PATH="", CXX="")
    assert result.returncode == 1
    assert "no C++ compiler found" in result.stderr
    assert "Everything works without them" in result.stderr
    assert not list(package.rglob("*.so"))


def test_a_compiler_that_is_not_there_is_named(package):
    result = run_build(PYTHONPATH=str(package), CXX="no-such-compiler")
    assert result.returncode == 1 and "CXX is no-such-compiler" in result.stderr


def test_a_compiler_that_fails_shows_what_it_said(package, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'out of registers' >&2\nexit 3\n")
    compiler.chmod(0o755)
    result = run_build(PYTHONPATH=str(package), CXX=str(compiler))
    assert result.returncode == 1
    assert "ended with status 3" in result.stderr and "out of registers" in result.stderr
    assert not list(package.rglob("*.so"))


def test_the_build_needs_nothing_but_the_standard_library(package):
    code = "import sys; sys.modules['torch'] = None; import k3tune_kernels.cpu.build"
    environment = {**os.environ, "PYTHONPATH": str(package)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_missing_library_is_an_obstacle_that_says_what_to_do(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libk3tune_cpu.so")
    assert "was not built: run python -m k3tune_kernels.cpu.build" in library.obstacle()
    with pytest.raises(ValueError, match="cannot be used: libk3tune_cpu"):
        library.load()


def test_a_file_that_is_no_library_is_an_obstacle(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libk3tune_cpu.so")
    build.LIBRARY.write_bytes(b"not an ELF file")
    assert "cannot be loaded" in library.obstacle()


@pytest.mark.skipif(library.obstacle() is not None, reason="no library to be out of date")
def test_a_library_of_other_sources_is_an_obstacle(fresh, monkeypatch):
    monkeypatch.setattr(build, "source_digest", lambda: "0123456789abcdef")
    assert "was built from other sources" in library.obstacle()


@pytest.mark.skipif(library.obstacle() is not None, reason="no library")
def test_an_unknown_instruction_set_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"portable.*found 'avx3'"):
        library.isa_index("avx3")


@pytest.mark.skipif(library.obstacle() is not None, reason="no library")
def test_threads_come_from_torchs_own_runtime():
    # the library names no OpenMP runtime: it finds the one torch has loaded, or stays alone
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    command = ["readelf", "-d", str(build.LIBRARY)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "omp" not in needed


SANITIZED = """
import sys
from pathlib import Path
import k3tune_kernels.cpu.build as build
build.LIBRARY = Path(sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


PARTS = (
    "cpu_products",
    "cpu_moe_lora",
    "cpu_steps",
    "cpu_decoding",
    "cpu_kda_rule",
    "short_convolution",
    "rms_norm",
)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ and its sanitizer libraries")
def test_no_sanitizer_finds_anything(tmp_path, repository, monkeypatch):
    def runtime(name: str) -> str:
        command = [str(COMPILER), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    runtimes = [runtime("libasan.so"), runtime("libubsan.so")]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("g++ has no sanitizer libraries here")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    monkeypatch.setenv("CXX", str(COMPILER))
    sanitized = build.build(tmp_path / "libk3tune_cpu.so", flags)
    tests = repository / "tests" / "kernels"
    result = subprocess.run(
        [
            *(sys.executable, "-c", SANITIZED, str(sanitized)),
            *(str(tests / f"test_{part}.py") for part in PARTS),
            *("-k", "not waves"),
        ],
        cwd=repository,
        env={
            **os.environ,
            "LD_PRELOAD": ":".join(runtimes),
            # Python and torch keep memory until the process ends
            "ASAN_OPTIONS": "detect_leaks=0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(repository / "kernels"),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
