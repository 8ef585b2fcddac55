"""The benchmarks of the CPU kernels run on this machine, so that they cannot rot."""

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


def test_the_benchmark_of_the_delta_rule_times_every_instruction_set(repository):
    script = repository / "kernels" / "bench" / "cpu_kda_rule.py"
    command = [sys.executable, str(script), "--rounds", "2"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for form in (*ISAS, "chunked torch"):
        rows = [line.split(" | ") for line in report.splitlines() if line.startswith(f"| {form} ")]
        assert len(rows) == 3
        assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)
