"""Runs the tests of the Triton kernels in the interpreter.

A kernel is interpreted or compiled as the environment says at its definition, so these tests have
processes of their own: the interpreter as shipped (fp32), and with real bf16 (``interpreter.py``).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = ("interpreted_fp32", "interpreted_bf16")

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="this process is interpreting already"
)


@pytest.fixture(scope="module")
def children(request) -> Iterator[dict[str, subprocess.Popen]]:
    """One pytest process a folder, side by side, with this run's choice of markers."""
    options = ["-q", "--tb=short", "-m", request.config.getoption("markexpr")]
    started = {
        folder: subprocess.Popen(
            [sys.executable, "-m", "pytest", str(HERE / folder), *options],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=request.config.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder in FOLDERS
    }
    yield started
    for child in started.values():
        if child.poll() is None:
            child.kill()
            child.wait()


@pytest.mark.parametrize("folder", FOLDERS)
def test_kernels_in_the_interpreter(folder, children):
    report, _ = children[folder].communicate()
    print(report)
    assert children[folder].returncode == 0, f"{folder}: see the report of its own pytest above"
