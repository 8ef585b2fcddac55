"""What two numerics are apart on k3-nano, and that mirroring takes it away.

scripts/measure_floor.py prints the whole table with intervals.
"""

import pytest

from k3tune.monitor.floor import k3_interval
from measure_floor import measure, table
from nano_lab import NanoLab


def test_mirrored_mxfp8_is_a_thousand_times_closer_in_fp32():
    lab = NanoLab(engine="mxfp8")
    rollouts = lab.sample(None, 0, lab.prompts(6, seed=1), each=3, seed=0)
    apart = k3_interval(lab.compare(None, rollouts, 3, 0))
    lab.rounding["trainer"] = "mxfp8"
    mirrored = k3_interval(lab.compare(None, rollouts, 3, 0))
    print(apart, mirrored)
    assert apart.value > 1000 * mirrored.value and apart.low > mirrored.high
    assert mirrored.value <= 1e-6


@pytest.mark.slow
def test_the_table_of_every_pair():
    rows = measure(num_prompts=24, num_samples=6, seed=0)
    print(table(rows))
    k3 = {(row["engine"], row["trainer"]): row["k3"] for row in rows}
    same, apart = k3["bf16", "bf16"], k3["bf16 + MXFP8", "bf16"]
    mirrored = k3["bf16 + MXFP8", "bf16 + MXFP8"]
    assert k3["fp32", "fp32"]["high"] <= 1e-6
    assert apart["value"] > same["high"]
    assert mirrored["value"] <= 3 * same["high"] and mirrored["value"] < apart["value"]
