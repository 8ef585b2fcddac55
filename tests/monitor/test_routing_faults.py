"""Routes flipped by more than the numerics: told from the flips every floor in 16 bits has."""

import dataclasses

import numpy as np
import pytest

from k3tune.monitor import Floor, FloorMonitor
from k3tune.monitor.samples import make_samples

PROMPTS, EACH, LENGTH, LAYERS, EXPERTS, ACTIVE = 8, 8, 24, 4, 32, 4
# share of (token, layer) in which BF16 swaps one expert, as on k3-nano
SWAPPED = 0.008


def draw(rng, *, size=0.003, swapped=SWAPPED, flipped=0.0):
    """A step: swaps move a token a little, flipped routes it and those after it a lot."""
    shape = (PROMPTS * EACH, LENGTH)
    entropy = rng.exponential(0.3, size=shape)
    rollout = -rng.exponential(entropy + 0.01)
    train_experts = rng.random((*shape, LAYERS, EXPERTS)).argsort(-1)[..., :ACTIVE]
    rollout_experts = train_experts.copy()
    swaps = rng.random((*shape, LAYERS)) < swapped
    # an id no router gives stands for the nearly equal one
    rollout_experts[swaps, 0] = EXPERTS
    flips = rng.random(shape) < flipped
    rollout_experts[flips] = EXPERTS + 1 + np.arange(ACTIVE)
    after = np.maximum.accumulate(flips, axis=1)
    spread = size * (1 + 3 * swaps.any(-1)) + 0.2 * flips + 0.1 * after
    return make_samples(
        rollout + spread * rng.standard_t(5, size=shape),
        rollout,
        np.ones(shape, bool),
        np.arange(len(rollout)) // EACH,
        np.zeros(len(rollout)),
        entropy=entropy,
        train_experts=train_experts,
        rollout_experts=rollout_experts,
        prompt_overlap=np.full(len(rollout), 1 - 1 / (LAYERS * ACTIVE)),
    )


@pytest.fixture(scope="module")
def floor():
    return Floor.calibrate(draw(np.random.default_rng(5)), key={})


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_a_floor_counts_swaps_by_token_and_layer(floor):
    assert floor.router_mismatch.value == pytest.approx(SWAPPED, rel=0.2)


def test_swaps_of_the_numerics_are_at_the_floor(floor, rng):
    monitor = FloorMonitor(floor)
    for _ in range(50):
        assert not monitor.step(draw(rng), adapter_version=0).alarms


def test_one_percent_of_the_tokens_routed_otherwise_are_named(floor, rng):
    values = FloorMonitor(floor).step(draw(rng, flipped=0.01), adapter_version=0).mismatch
    assert values["attribution"] == "routing flips", values["attribution_text"]
    assert "mostly other experts" in values["attribution_text"]
    assert values["evidence"]["tokens"] == pytest.approx(0.01, abs=0.005)


def test_also_where_their_log_probabilities_hardly_differ(floor, rng):
    flipped = draw(rng, flipped=0.01)
    alike = dataclasses.replace(flipped, train=draw(rng).log_ratio + flipped.rollout)
    values = FloorMonitor(floor).step(alike, adapter_version=0).mismatch
    assert values["attribution"] == "routing flips"
    assert "more than its numerics do" in values["attribution_text"]


def test_an_excess_of_all_tokens_is_none_of_theirs(floor, rng):
    # as a stale adapter does: every token moves, and more routes with them
    step = draw(rng, size=0.03, swapped=3 * SWAPPED, flipped=0.002)
    values = FloorMonitor(floor).step(step, adapter_version=0).mismatch
    assert values["verdict"] == "above floor" and values["attribution"] != "routing flips"
