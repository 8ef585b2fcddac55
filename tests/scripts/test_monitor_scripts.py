"""The scripts that measure floors and power, as far as they go without sampling."""

import numpy as np

from floor_by_depth import PAIRS, mla_layers
from floor_by_depth import table as depth_table
from k3tune.monitor.record import CAUSES as NAMES
from k3tune.monitor.samples import make_samples
from measure_floor import PAIRS as NUMERICS
from measure_floor import name_of
from nano_lab import FAULTS
from power_table import CAUSES, Power, rows_of
from power_table import table as power_table


def test_a_narrow_model_has_the_layer_pattern_of_k3():
    assert mla_layers(93) == [*range(3, 92, 4), 92]
    assert mla_layers(8) == [3, 7]


def test_every_fault_has_the_cause_it_should_be_given():
    assert tuple(CAUSES) == FAULTS and set(CAUSES.values()) <= set(NAMES)


def test_pairs_are_named_in_words():
    assert [name_of(dtype, engine) for dtype, engine, _ in NUMERICS][3:] == [
        *("bf16", "bf16 + MXFP8", "bf16 + MXFP8"),
    ]


def test_some_samples_of_all_keep_their_fields():
    entropy = np.arange(6.0).reshape(3, 2)
    samples = make_samples(entropy, entropy, np.ones((3, 2)), [0, 1, 1], [4, 4, 4], entropy=entropy)
    some = rows_of(samples, samples.prompts == 1)
    assert some.entropy.tolist() == [[2, 3], [4, 5]] and some.token_ids is None


def test_tables_have_a_cell_for_every_column():
    row = Power("fp32 / fp32", "stale", 2e-4, 150.0, 1.0, 0.0, 1.0, 1.0, 1.04)
    lines = power_table([row, row]).splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {10}
    interval = {"value": 1e-5, "low": 1e-6, "high": 1e-4}
    rows = [
        {"depth": depth, "numerics": name, "k3": interval, "router_mismatch": 0.01}
        for depth in (6, 93)
        for name in PAIRS
    ]
    lines = depth_table(rows).splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {len(PAIRS) + 2}
