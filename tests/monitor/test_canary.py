"""The pinned trajectory: who moved, who did not, and by how much."""

import json

import numpy as np
import pytest

from k3tune.errors import ConfigError
from k3tune.monitor.canary import TOKENS, Canary, choose_canaries
from k3tune.monitor.samples import make_samples

BASE = -np.abs(np.random.default_rng(0).normal(size=24))
# what each adapter version adds to the scores, growing
MOVES = np.cumsum(0.01 * np.random.default_rng(1).normal(size=(6, 24)), axis=0)


def scores(version):
    return BASE + MOVES[version - 1] if version else BASE


def checks(engine, noise=0.0, **options):
    """The checks of versions 1, 2, ... with the engine's scores given a version."""
    rng = np.random.default_rng(2)
    canary = Canary(BASE + noise * rng.normal(size=24), BASE, **options)
    return [
        canary.check(version, engine(version) + noise * rng.normal(size=24), scores(version))
        for version in range(1, 6)
    ]


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_both_sides_move_together(noise):
    for check in checks(scores, noise):
        assert (check.record["verdict"], check.cause, check.failed) == (
            "moved together",
            None,
            False,
        )


def test_nothing_moves_without_an_update():
    canary = Canary(BASE, BASE)
    check = canary.check(1, BASE, BASE)
    assert check.record["verdict"] == "nothing moved" and not check.failed


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_an_engine_one_version_behind_is_told(noise):
    first, *others = checks(lambda version: scores(version - 1), noise)
    assert first.cause == "stale adapter" and first.failed
    for version, check in enumerate(others, start=2):
        assert check.cause == "stale adapter" and check.record["verdict"] == "differ"
        assert f"version {version - 1} where the trainer has {version}" in check.text


def test_a_push_that_stops_arriving_is_told_even_inside_the_noise():
    # 30 times the step: differences say nothing, standing still does
    canary = Canary(BASE + 0.3, BASE)
    assert not canary.check(1, scores(1) + 0.3, scores(1)).failed
    check = canary.check(2, scores(1) + 0.3, scores(2))
    assert (check.record["verdict"], check.cause) == ("engine did not move", "stale adapter")


def test_an_engine_that_never_applies_the_adapter_is_told():
    assert checks(lambda version: BASE)[2].cause == "adapter not applied"


@pytest.mark.parametrize("scale", [0.5, 2.0, 1 / np.sqrt(8)])
def test_a_wrong_scale_is_told_with_the_factor(scale):
    for check in checks(lambda version: BASE + scale * (scores(version) - BASE)):
        assert check.cause == "adapter scale"
        assert check.record["scale"] == pytest.approx(scale)


def test_an_adapter_with_a_part_missing_differs_without_a_name():
    part = np.where(np.arange(24) % 6, 1.0, 0.0)
    for check in checks(lambda version: BASE + part * (scores(version) - BASE)):
        assert (check.record["verdict"], check.cause) == ("differ", None)


def test_rounding_of_the_adapter_is_allowed_where_it_is_said():
    def rounded(version):
        return BASE + (scores(version) - BASE) * (1 + 0.003 * (-1) ** np.arange(24))

    assert {check.record["verdict"] for check in checks(rounded)} == {"differ"}
    allowed = checks(rounded, adapter_rounded=True)
    assert {check.record["verdict"] for check in allowed} == {"moved together"}


def test_a_trainer_that_stands_still_is_told():
    canary = Canary(BASE, BASE)
    check = canary.check(1, scores(1), BASE)
    assert check.record["verdict"] == "trainer did not move"


def test_a_canary_goes_on_after_a_restart():
    whole, half = Canary(BASE, BASE), Canary(BASE, BASE)
    whole.check(1, scores(1), scores(1))
    half.check(1, scores(1), scores(1))
    half = Canary.restored(json.loads(json.dumps(half.state())))
    assert half.check(2, scores(1), scores(2)) == whole.check(2, scores(1), scores(2))


def test_scores_that_are_no_numbers_are_refused():
    canary = Canary(BASE, BASE)
    with pytest.raises(ConfigError, match="24 scores hold 1 that are not finite"):
        canary.check(1, np.where(np.arange(24) == 3, np.nan, BASE), BASE)
    with pytest.raises(ConfigError, match="has 24 tokens, got 23 scores of the engine"):
        canary.check(1, BASE[1:], BASE)


def test_a_wrong_scale_is_told_within_the_scatter_of_coarse_numerics():
    rng = np.random.default_rng(3)
    base = np.zeros(TOKENS)
    moves = 0.01 * rng.normal(size=TOKENS)
    # as large as what the adapter moves
    scatter = 0.01 * rng.normal(size=TOKENS)
    twice = Canary(base, base).check(1, 2 * moves + scatter, moves)
    assert twice.record["scale_fit"] < 0.9 and twice.cause == "adapter scale"
    once = Canary(base, base).check(1, moves + scatter, moves)
    assert once.record["verdict"] == "differ" and once.cause is None


def test_a_wrong_scale_is_told_beside_tokens_that_jump_with_a_route():
    rng = np.random.default_rng(5)
    base, moves = np.zeros(TOKENS), 0.01 * rng.normal(size=TOKENS)
    jumps = np.zeros(TOKENS)
    jumps[:4] = 1.0
    twice = Canary(base, base).check(1, 2 * moves + jumps, moves)
    assert twice.cause == "adapter scale" and twice.record["scale"] == pytest.approx(2)
    once = Canary(base, base).check(1, moves + jumps, moves)
    assert once.record["verdict"] == "differ" and once.cause is None


def test_the_least_certain_samples_are_pinned():
    half = TOKENS // 2
    certainty = np.array([0.9, 0.8, 0.01, 0.7, 5.0])[:, None]
    rollout = np.broadcast_to(-certainty, (5, half)).copy()
    mask = np.ones((5, half))
    # one rare token is not many uncertain ones, and a masked token tells nothing
    rollout[2, 0] = -50
    mask[4] = 0
    samples = make_samples(rollout, rollout, mask, range(5), [0] * 5)
    assert choose_canaries(samples) == [0, 1]
    entropy = np.array([0.1, 0.2, 0.4, 0.3, 9.0])[:, None].repeat(half, 1)
    samples = make_samples(rollout, rollout, mask, range(5), [0] * 5, entropy=entropy)
    assert choose_canaries(samples) == [2, 3]


def test_one_long_completion_is_enough():
    rollout = -np.ones((3, TOKENS))
    samples = make_samples(rollout, rollout, rollout < 0, range(3), [0] * 3)
    assert choose_canaries(samples) == [0]
