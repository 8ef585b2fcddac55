"""Placing experts by measured rows: as even as can be, repeatable, kept in a file."""

import itertools
import time

import numpy as np
import pytest

from k3tune.errors import ConfigError
from k3tune.parallel.placement import place_experts, read_placement, write_placement
from k3tune.parallel.quantile_balance import chosen_counts, quantile_biases
from k3tune.parallel.router_counts import RouterCounts
from k3tune.parallel.shards import ExpertShards

EXPERTS, RANKS = 896, 32


def zipf(exponent, seed=0, experts=EXPERTS, rows=10_000_000):
    """Rows by expert: hot ones anywhere, or without a seed first."""
    shares = 1 / np.arange(1, experts + 1) ** exponent
    shares /= shares.sum()
    if seed is not None:
        shares = np.random.default_rng(seed).permutation(shares)
    return (shares * rows).astype(np.int64)


def counts(*layers):
    return RouterCounts(len(layers[0]), dict(enumerate(layers, start=1)))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_skewed_routing_becomes_even_within_a_tenth(seed):
    measured = counts(zipf(0.5, seed))
    start = time.process_time()
    placed = place_experts(measured, RANKS)
    assert time.process_time() - start < 10
    assert measured.imbalance(measured.contiguous(RANKS)) > 1.5
    assert measured.imbalance(placed) < 1.10
    sizes = np.bincount(placed.ranks(1), minlength=RANKS)
    assert set(sizes) == {EXPERTS // RANKS}


def test_a_real_number_of_layers_takes_seconds():
    measured = counts(*(zipf(0.4, seed) for seed in range(92)))
    start = time.process_time()
    placed = place_experts(measured, RANKS)
    assert time.process_time() - start < 10
    assert measured.imbalance(placed) < 1.02


def test_the_same_counts_give_the_same_placement_also_with_equal_experts():
    for row in (zipf(0.5), np.full(EXPERTS, 7, dtype=np.int64), zipf(0.5) // 1_000_000 + 1):
        first, second = (place_experts(counts(row), RANKS) for _ in range(2))
        assert first == second


def test_few_experts_are_placed_as_well_as_trying_everything():
    for seed in range(5):
        row = np.random.default_rng(seed).integers(0, 100, 8)
        measured = counts(row)
        best = min(
            max(row[list(half)].sum(), row.sum() - row[list(half)].sum())
            for half in itertools.combinations(range(8), 4)
        )
        found = measured.rank_loads(place_experts(measured, 2), 1).max()
        assert found <= 1.02 * best


def test_no_placement_is_better_than_the_least_imbalance():
    for exponent in (0.0, 0.3, 0.6, 1.0):
        measured = counts(zipf(exponent, 1), zipf(exponent, 2))
        least = measured.least_imbalance(RANKS)
        found = measured.imbalance(place_experts(measured, RANKS))
        assert 1 <= least <= found <= 1.05 * least


@pytest.mark.parametrize(("experts", "ranks"), [(7, 3), (8, 8), (5, 1)])
def test_ranks_hold_as_many_experts_as_without_a_placement(experts, ranks):
    measured = counts(zipf(0.5, experts=experts, rows=1000))
    placed = place_experts(measured, ranks)
    found = tuple(np.bincount(placed.ranks(1), minlength=ranks).tolist())
    assert found == ExpertShards(experts, ranks).sizes
    # layers that were not measured stay as they are
    assert placed.experts(0, 5) == ExpertShards(experts, ranks).experts(0, 5)


def test_a_placement_is_kept_in_a_file(tmp_path):
    placed = place_experts(counts(zipf(0.5), zipf(0.3)), RANKS)
    write_placement(tmp_path / "placement.json", placed)
    assert read_placement(tmp_path / "placement.json") == placed


def test_counts_are_kept_in_a_file(tmp_path):
    measured = counts(zipf(0.5), zipf(0.3))
    measured.write(tmp_path / "counts.json")
    found = RouterCounts.read(tmp_path / "counts.json")
    assert found.layers.keys() == measured.layers.keys()
    assert all((found.layers[layer] == measured.layers[layer]).all() for layer in found.layers)


def test_loads_name_the_busiest_rank_and_the_hottest_experts():
    row = np.array([1, 2, 3, 94], dtype=np.int64)
    measured = counts(row)
    shards = ExpertShards(4, 2)
    (load,) = measured.loads(shards, hottest=2)
    assert (load.layer, load.busiest_rank) == (1, 1)
    assert load.imbalance == pytest.approx(97 / 50) == measured.imbalance(shards)
    assert load.hottest == ((3, 0.94), (2, 0.03))
    # layers wait one after the other: the mean of their busiest ranks, by rows
    both = counts(row, np.array([25, 25, 25, 25], dtype=np.int64))
    assert both.imbalance(shards) == pytest.approx((97 + 50) / 100)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "list"),
        ('{"format": 2, "counts": {}}', "format"),
        ('{"format": 1, "num_experts": 2, "counts": {"1": [1]}}', "expected 2 counts"),
        ('{"format": 1, "num_experts": 2, "counts": {"1": [1, 0.5]}}', "counts"),
        ('{"format": 1, "num_experts": 2, "counts": {"1": [0, 0]}}', "all 0"),
        ('{"format": 1, "num_experts": 2, "counts": {"1": [3, -1]}}', "from 0 on"),
        ('{"format": 1, "num_experts": 2, "counts": {}}', "no layer"),
    ],
)
def test_a_file_without_counts_is_refused_in_a_sentence(text, said, tmp_path):
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        RouterCounts.read(tmp_path / "counts.json")


def test_a_missing_file_and_another_bases_placement_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the router counts"):
        RouterCounts.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="expected 4 as"):
        counts(np.arange(4)).imbalance(ExpertShards(6, 2))
    with pytest.raises(ConfigError, match="expected 1 to 4"):
        place_experts(counts(np.arange(4)), 5)


def test_quantile_biases_even_out_what_the_router_chooses():
    generator = np.random.default_rng(0)
    tokens, experts, active = 4096, 64, 4
    logits = generator.normal(size=(tokens, experts)) + 1.5 * generator.normal(size=experts)
    scores, biases = 1 / (1 + np.exp(-logits)), np.zeros(experts)
    before = chosen_counts(scores, biases, active)
    for _ in range(8):
        biases = quantile_biases(scores, biases, active)
    after = chosen_counts(scores, biases, active)
    assert before.sum() == after.sum() == tokens * active
    assert before.max() > 4 * before.mean() and after.max() < 1.2 * after.mean()
    assert biases.mean() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("layers", ['{"1": [1e30]}', f'{{"1": [{2**62}]}}', '{"01": [1]}'])
def test_counts_that_no_run_has_are_refused(layers, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(f'{{"format": 1, "num_experts": 1, "counts": {layers}}}')
    with pytest.raises(ConfigError, match="counts up to"):
        RouterCounts.read(file)
