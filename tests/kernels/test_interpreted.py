"""Runs the tests of the Triton kernels in the interpreter.

A kernel is interpreted or compiled as the environment says at its definition, so these tests have
processes of their own: the interpreter as shipped (fp32), and with real bf16 (``interpreter.py``).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("folder", ["interpreted_fp32", "interpreted_bf16"])
def test_kernels_in_the_interpreter(folder, request):
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("this process is interpreting already")
    command = [sys.executable, "-m", "pytest", str(HERE / folder), "-q", "--tb=short", "-rf"]
    command += ["-m", request.config.getoption("markexpr")]
    child = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=request.config.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(child.stdout)
    assert child.returncode == 0, f"{folder}: pytest exited {child.returncode}, see its report"
