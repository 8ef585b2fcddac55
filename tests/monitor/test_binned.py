"""What plots are drawn from: few numbers that still add up to every token."""

import json

import numpy as np
import pytest

from k3tune.monitor.binned import binned
from k3tune.monitor.estimators import k3_of
from k3tune.monitor.record import PROBABILITY_EDGES, R_EDGES, SURPRISE_EDGES
from k3tune.monitor.samples import make_samples


@pytest.fixture
def step():
    """40 samples of 1 to 600 tokens; |r| over eight decades, probabilities over five."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 600, size=40)
    mask = np.arange(600) < lengths[:, None]
    rollout = -rng.exponential(1.0, size=mask.shape) * 10.0 ** rng.integers(-4, 1, mask.shape)
    train = rollout + rng.normal(size=mask.shape) * 10.0 ** rng.integers(-8, 1, mask.shape)
    return make_samples(train, rollout, mask, range(40), [3] * 40)


def test_edges_are_in_order_and_symmetric():
    assert len(R_EDGES) == 30 and list(R_EDGES) == sorted(R_EDGES)
    assert [-edge for edge in reversed(R_EDGES)] == pytest.approx(R_EDGES)
    assert R_EDGES[15] == pytest.approx(1e-6) and R_EDGES[-1] == pytest.approx(10)
    assert list(SURPRISE_EDGES) == sorted(SURPRISE_EDGES)
    assert list(PROBABILITY_EDGES) == sorted(PROBABILITY_EDGES)


def test_every_token_is_in_one_bin_of_each_kind(step):
    tokens, values = int(step.mask.sum()), binned(step)
    assert sum(values["histogram"]) == tokens and len(values["histogram"]) == len(R_EDGES) + 1
    assert sum(count for _, _, count in values["scatter"]) == tokens
    assert sum(values["by_probability"]["tokens"]) == tokens
    assert sum(values["by_position"]["tokens"]) == tokens
    assert sum(values["by_length"]["samples"]) == 40


def test_bin_means_add_up_to_the_mean_of_all(step):
    values, k3 = binned(step), k3_of(step.log_ratio)[step.mask]
    for kind in ("by_probability", "by_position"):
        counts, means = values[kind]["tokens"], values[kind]["k3"]
        total = sum(n * k for n, k in zip(counts, means, strict=True) if n)
        assert total / len(k3) == pytest.approx(k3.mean(), rel=1e-3)


def test_tokens_land_where_the_record_says():
    train, rollout = np.log([[0.5, 0.5, 0.98]]), np.log([[0.5, 0.02, 0.999]])
    values = binned(make_samples(train, rollout, [[1, 1, 1]], [0], [0]))
    # r is 0, ln 25 = 3.2 and -0.019
    assert [n for n, count in enumerate(values["histogram"]) if count] == [6, 15, 29]
    # -ln 0.5 = 0.69 is in bin 8, -ln 0.02 = 3.9 in 13, -ln 0.98 = 0.02 in 3, -ln 0.999 in 1
    assert values["scatter"] == [[3, 1, 1], [8, 8, 1], [8, 13, 1]]
    assert values["by_probability"]["tokens"] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 1]
    # places 0, 1 and 2: buckets [0], [1, 2]; a length of 3: bucket [2, 3]
    assert values["by_position"]["tokens"] == [1, 2]
    assert values["by_length"]["samples"] == [0, 1] and values["by_length"]["k3"][0] is None


def test_a_step_without_tokens_has_empty_bins():
    values = binned(make_samples([[0.0]], [[0.0]], [[0]], [0], [0]))
    assert sum(values["histogram"]) == 0 and values["scatter"] == []
    assert values["by_position"] == {"tokens": [], "k3": []}


def test_it_is_json_and_small(step):
    text = json.dumps(binned(step), allow_nan=False)
    # a step spread over all bins; one of k3-nano takes 900 bytes
    assert len(text) < 3000, len(text)
