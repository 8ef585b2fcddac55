"""Importance weights by hand: what each mode keeps, cuts and takes out."""

import math

import pytest
import torch

from k3tune.arguments import IMPORTANCE_MODES
from k3tune.rl.objective import importance_weights

# two samples of three places, the second ends after two tokens
RATIO = torch.tensor([[0.0, math.log(2), math.log(8)], [math.log(0.1), 0.0, 5.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.1, -9.0]])


def weights(mode, cap=4.0, ratio=RATIO):
    return importance_weights(ROLLOUT + ratio, ROLLOUT, MASK, mode=mode, cap=cap)


@pytest.mark.parametrize(
    ("mode", "expected", "num_masked", "num_truncated"),
    [
        ("none", [[1, 1, 1], [1, 1, 0]], 0, 0),
        ("token_truncate", [[1, 2, 4], [0.1, 1, 0]], 0, 1),
        ("token_mask", [[1, 2, 0], [0, 1, 0]], 2, 0),
        # geometric means: 16^(1/3) = 2.52 and 0.1^(1/2) = 0.316
        ("sequence_truncate", [[2.52, 2.52, 2.52], [0.316, 0.316, 0]], 0, 0),
        ("sequence_mask", [[2.52, 2.52, 2.52], [0.316, 0.316, 0]], 0, 0),
    ],
)
def test_each_mode_by_hand(mode, expected, num_masked, num_truncated):
    found = weights(mode)
    torch.testing.assert_close(found.weights, torch.tensor(expected).float(), rtol=2e-3, atol=1e-6)
    assert (found.num_masked, found.num_truncated) == (num_masked, num_truncated)


def test_whole_sequences_are_cut_and_masked_at_a_smaller_cap():
    cut, masked = weights("sequence_truncate", cap=2.0), weights("sequence_mask", cap=2.0)
    torch.testing.assert_close(cut.weights[0], torch.full((3,), 2.0))
    assert cut.num_truncated == 3
    # 0.316 is below 1 / 2
    assert not masked.weights.any() and masked.num_masked == 5


def test_a_sequence_weight_does_not_grow_with_length():
    """0.012 nats a token over 1,000 tokens: a sum would be e^12."""
    rollout = torch.zeros(1, 1000)
    found = importance_weights(
        rollout + 0.012, rollout, torch.ones(1, 1000), mode="sequence_truncate", cap=3.0
    )
    torch.testing.assert_close(found.weights, torch.full((1, 1000), math.exp(0.012)))


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_equal_policies_weigh_everything_with_one(mode):
    found = weights(mode, ratio=torch.zeros_like(RATIO))
    assert torch.equal(found.weights, MASK.float())
    assert (found.num_masked, found.num_truncated) == (0, 0)


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_a_logprob_that_is_not_finite_is_taken_out_and_counted(mode):
    train = (ROLLOUT + RATIO).clone()
    train[0, 1] = math.nan
    rollout = ROLLOUT.clone()
    rollout[1, 1] = -math.inf
    found = importance_weights(train, rollout, MASK, mode=mode, cap=100.0)
    assert found.weights.isfinite().all()
    assert found.weights[0, 1] == found.weights[1, 1] == 0
    assert found.num_masked == 2


def test_a_huge_ratio_stays_finite():
    found = weights("token_truncate", cap=1e30, ratio=torch.full_like(RATIO, 500.0))
    assert found.weights.isfinite().all()


def test_no_gradient_flows_through_weights():
    train = (ROLLOUT + RATIO).requires_grad_()
    assert not importance_weights(
        train, ROLLOUT, MASK, mode="token_truncate", cap=2.0
    ).weights.requires_grad
