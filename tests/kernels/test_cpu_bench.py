"""The benchmark of the CPU kernels runs on this machine, so that it cannot rot."""

import subprocess
import sys

import pytest

from cpu_cases import ISAS, needs_library

pytestmark = [needs_library, pytest.mark.slow]


@pytest.mark.skipif("avx2" not in ISAS, reason="its ceilings are measured from AVX2 on")
def test_the_cpu_benchmark_times_ours_and_the_reference(repository):
    script = repository / "kernels" / "bench" / "cpu_moe.py"
    command = [sys.executable, str(script), "--section", "nano", "--rounds", "2"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "GFLOP/s" in report.splitlines()[0]
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| 64 tokens")]
    # without kt-kernel its row has the reason and no figure
    rows = [row for row in rows if row[1]]
    candidates = {row[2] for row in rows}
    assert {"ours", "reference", "resident bfloat16", "resident float32"} <= candidates
    assert all(float(row[4]) > 0 for row in rows)
