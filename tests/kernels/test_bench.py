"""The benchmark runs on this machine, so that it cannot rot."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_small_benchmark_times_every_candidate_that_can_run_here(request, tmp_path):
    script = request.config.rootpath / "kernels" / "bench" / "run.py"
    command = [sys.executable, str(script), "--small", "--device", "cpu", "--rounds", "2"]
    subprocess.run([*command, "--output-dir", str(tmp_path)], check=True)

    report = json.loads((tmp_path / "bench.json").read_text())
    rows = report["results"]
    timed = {(row["op"], row["candidate"]) for row in rows if row["timing"]}
    for op in ("moe_lora", "situ_glu", "attention_residual", "linear_cross_entropy"):
        assert (op, "k3tune") in timed
    assert ("moe_lora", "dequantise all + grouped GEMM") in timed
    assert ("moe_lora", "resident bfloat16 weights") in timed
    assert ("linear_cross_entropy", "torch, all logits") in timed

    untimed = [row for row in rows if not row["timing"]]
    assert all(
        row["not_timed"].endswith("is not installed") or row["not_timed"] == "needs a GPU"
        for row in untimed
    ), untimed
    assert all(row["timing"]["median_s"] > 0 for row in rows if row["timing"])
    assert report["about"]["ceilings"]["matmul_flops"] > 0

    table = (tmp_path / "bench.md").read_text()
    assert all(row["candidate"] in table for row in rows)
