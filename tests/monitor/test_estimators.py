"""Every estimator against numbers worked out by hand, and against exact arithmetic."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch

from k3tune.errors import ConfigError
from k3tune.monitor import mismatch
from k3tune.monitor.estimators import k3_of
from k3tune.monitor.samples import concatenate, make_samples

LN2 = math.log(2)


def samples_of(r, *, rollout=-1.0, mask=None, **others):
    """Samples with these log ratios, rows padded with tokens that must not count."""
    longest = max(map(len, r))
    train = [[rollout + x for x in row] + [math.nan] * (longest - len(row)) for row in r]
    counted = [[True] * len(row) + [False] * (longest - len(row)) for row in r]
    sides = np.full((len(r), longest), rollout)
    return make_samples(train, sides, mask or counted, range(len(r)), [0] * len(r), **others)


@pytest.fixture
def by_hand():
    """w is 2 at one token, 1/2 at another, and 1 twice: two samples, of one and of three tokens."""
    return mismatch(samples_of([[LN2], [-LN2, 0.0, 0.0]]))


def test_sample_means_and_token_means_differ(by_hand):
    high, low = 2 - 1 - LN2, 0.5 - 1 + LN2
    assert by_hand["k3"] == pytest.approx((high + low / 3) / 2, rel=1e-14)
    assert by_hand["k3_token_mean"] == pytest.approx((high + low) / 4, rel=1e-14)
    assert by_hand["k1"] == pytest.approx((-LN2 + LN2 / 3) / 2, rel=1e-14)
    assert by_hand["k1_token_mean"] == pytest.approx(0.0, abs=1e-16)
    assert by_hand["k2"] == pytest.approx(LN2**2 / 2 * (1 + 1 / 3) / 2, rel=1e-14)
    assert by_hand["k2_token_mean"] == pytest.approx(LN2**2 / 4, rel=1e-14)


def test_the_reverse_direction_and_jensen_shannon(by_hand):
    # k3 of -r swaps the two tokens
    high, low = 2 - 1 - LN2, 0.5 - 1 + LN2
    assert by_hand["k3_reverse"] == pytest.approx((low + high / 3) / 2, rel=1e-14)
    js_of_2 = (2 * LN2 - 3 * math.log(1.5)) / 2
    js_of_half = (-0.5 * LN2 - 1.5 * math.log(0.75)) / 2
    assert by_hand["js"] == pytest.approx((js_of_2 + js_of_half / 3) / 2, rel=1e-12)


def test_absolute_differences(by_hand):
    assert by_hand["abs_mean"] == pytest.approx(LN2 / 2)
    assert by_hand["abs_std"] == pytest.approx(LN2 / 2)
    assert by_hand["abs_median"] == pytest.approx(LN2 / 2)
    assert by_hand["abs_p95"] == pytest.approx(LN2)
    assert by_hand["abs_max"] == pytest.approx(LN2)
    assert by_hand["mult_prob_error"] == pytest.approx((2 + 2 + 1 + 1) / 4)


def test_importance_ratios(by_hand):
    assert by_hand["is_mean"] == pytest.approx(4.5 / 4)
    assert by_hand["is_std"] == pytest.approx(math.sqrt((4 + 0.25 + 2) / 4 - (4.5 / 4) ** 2))
    assert (by_hand["is_min"], by_hand["is_max"]) == pytest.approx((0.5, 2))
    assert by_hand["is_sequence_mean"] == pytest.approx((2 + 0.5) / 2)
    assert (by_hand["is_sequence_min"], by_hand["is_sequence_max"]) == pytest.approx((0.5, 2))
    third = 2 ** (-1 / 3)
    assert by_hand["is_geometric_mean"] == pytest.approx((2 + third) / 2)
    assert (by_hand["is_geometric_min"], by_hand["is_geometric_max"]) == pytest.approx((third, 2))
    assert by_hand["ess"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert by_hand["ess_sequence"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert by_hand["chi2"] == pytest.approx(6.25 / 4 - 1)
    assert by_hand["chi2_sequence"] == pytest.approx(4.25 / 2 - 1)


def test_ratios_out_of_bounds():
    assert mismatch(samples_of([[0.7, -0.7, 0.1, 0.0]]))["is_out_of_bounds"] == 0.5


def test_perplexities(by_hand):
    # both sides' mean log-probability is -1: the two r cancel
    assert by_hand["ppl_rollout"] == pytest.approx(math.e)
    assert by_hand["ppl_ratio"] == pytest.approx(1.0)
    assert by_hand["log_ppl_diff"] == pytest.approx((-LN2 + LN2 / 3) / 2)
    assert by_hand["log_ppl_abs_diff"] == pytest.approx((LN2 + LN2 / 3) / 2)
    shifted = mismatch(samples_of([[-0.5], [-0.5, -0.5]]))
    assert shifted["ppl_train"] == pytest.approx(math.exp(1.5))
    assert shifted["ppl_ratio"] == pytest.approx(math.exp(0.5))


def test_entropy_gives_a_ratio():
    values = mismatch(samples_of([[LN2, 0.0]], entropy=[[0.5, 1.5]]))
    assert values["entropy"] == 1.0
    assert values["kl_entropy_ratio"] == pytest.approx((1 - LN2) / 2)
    assert mismatch(samples_of([[0.0]]))["entropy"] is None


def test_what_the_correction_took_out_is_counted():
    weights = [[0.0, 0.5, math.exp(0.1), 1.0]]
    values = mismatch(samples_of([[0.3, LN2, 0.1, 0.0]], correction=weights))
    assert (values["masked_fraction"], values["truncated_fraction"]) == (0.25, 0.25)


@pytest.mark.parametrize("side", ["train", "rollout"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_token_that_is_not_finite_is_counted_and_left_out(side, bad):
    sides = {"train": [[-1.0, -2.0]], "rollout": [[-1.5, -2.0]]}
    sides[side] = [[-1.0 if side == "train" else -1.5, bad]]
    values = mismatch(make_samples(**sides, mask=[[1, 1]], prompts=[0], adapter_versions=[0]))
    assert (values["nan_count"], values["num_tokens"]) == (1, 1)
    assert values["abs_mean"] == 0.5 and values["k3"] == pytest.approx(math.exp(0.5) - 1.5)


def test_a_masked_token_is_not_counted_whatever_it_holds():
    values = mismatch(samples_of([[0.5, math.nan]], mask=[[True, False]]))
    assert (values["nan_count"], values["num_tokens"]) == (0, 1)


def test_large_ratios_are_cut_and_counted():
    values = mismatch(samples_of([[3.0, 200.0, -200.0, 2.0]]))
    # e^3 - 4 is 16.1: above 10; r = -200 has k3 = 199
    assert values["clamp_count"] == 3
    assert values["k3"] == pytest.approx((10 + 10 + 10 + math.e**2 - 3) / 4)
    assert values["clamp_count_sequence"] == 0
    assert mismatch(samples_of([[15.0, 15.0]]))["clamp_count_sequence"] == 1
    assert all(math.isfinite(value) for value in values.values() if value is not None)


def test_without_a_token_there_is_no_number():
    values = mismatch(samples_of([[0.0], [0.0]], mask=[[False], [False]]))
    assert values["num_tokens"] == 0 and values["nan_count"] == 0
    counts = {"num_samples", "num_tokens", "nan_count", "clamp_count", "clamp_count_sequence"}
    assert {name for name, value in values.items() if value is not None} == counts


@pytest.mark.parametrize("r", [1e-9, -3e-7, 9.99e-4, -9.99e-4, 1.001e-3, 0.05, -2.0, 2.3])
def test_k3_keeps_its_digits_at_every_size(r):
    getcontext().prec = 50
    exact = Decimal(r).exp() - 1 - Decimal(r)
    assert float(k3_of(np.array(r))) == pytest.approx(float(exact), rel=2e-10)


def test_half_precision_inputs_are_summed_in_fp64():
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(64, 200, generator=generator).bfloat16()
    train = rollout + 0.01 * torch.randn(64, 200, generator=generator).bfloat16()
    values = mismatch(
        make_samples(train, rollout, torch.ones(64, 200), torch.arange(64), torch.zeros(64))
    )
    r = train.double() - rollout.double()
    exact = [math.fsum((math.expm1(x) - x) for x in row) / 200 for row in r.tolist()]
    assert values["k3"] == pytest.approx(math.fsum(exact) / 64, rel=1e-9)
    assert values["k1"] == pytest.approx(-r.mean().item(), rel=1e-9)


def test_k3_is_unbiased_for_the_divergence_of_two_distributions():
    rng = np.random.default_rng(0)
    rollout, train = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.3, 0.25])
    drawn = rng.choice(3, size=(400, 500), p=rollout)
    values = mismatch(
        make_samples(
            np.log(train)[drawn], np.log(rollout)[drawn], np.ones_like(drawn), range(400), [0] * 400
        )
    )
    divergence = float((rollout * np.log(rollout / train)).sum())
    assert values["k3"] == pytest.approx(divergence, rel=0.02)
    # the same, with 5 times the spread
    assert values["k1"] == pytest.approx(divergence, rel=0.15)
    assert values["is_mean"] == pytest.approx(1, abs=2e-3)


def test_micro_batches_of_different_lengths_are_joined():
    parts = [samples_of([[LN2]]), samples_of([[-LN2, 0.0, 0.0]])]
    assert mismatch(concatenate(parts)) == mismatch(samples_of([[LN2], [-LN2, 0.0, 0.0]]))


def test_arrays_of_other_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"rollout has shape \(1, 3\), expected it to begin"):
        make_samples([[0.0, 0.0]], [[0.0, 0.0, 0.0]], [[1, 1]], [0], [0])
