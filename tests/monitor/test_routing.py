"""Expert sets, compared as sets."""

import numpy as np
import pytest

from k3tune.monitor.routing import router_mismatch, smallest_overlap, token_overlap
from k3tune.monitor.samples import make_samples


def routed(train, rollout, mask):
    """``[S, T, L, A]`` experts of both sides; log-probabilities do not matter here."""
    zeros = np.zeros(np.shape(mask))
    count = len(mask)
    return make_samples(
        zeros, zeros, mask, [0] * count, [0] * count, train_experts=train, rollout_experts=rollout
    )


def test_a_set_in_another_order_is_the_same_set():
    values = router_mismatch(routed([[[[3, 1, 2]]]], [[[[2, 3, 1]]]], [[1]]))
    assert (values["router_mismatch"], values["router_overlap"]) == (0.0, 1.0)


def test_shares_are_counted_by_layer_and_by_token():
    # two tokens, two layers; the first token differs in one expert of layer 1
    train = [[[[0, 1], [4, 5]], [[0, 1], [4, 5]]]]
    rollout = [[[[1, 0], [4, 6]], [[0, 1], [5, 4]]]]
    values = router_mismatch(routed(train, rollout, [[1, 1]]))
    assert values["router_mismatch"] == 1 / 4
    assert values["router_mismatch_tokens"] == 1 / 2
    assert values["router_mismatch_layers"] == [0.0, 0.5]
    assert values["router_overlap"] == 7 / 8


def test_a_token_shares_as_many_experts_as_its_layers_do():
    train = [[[[0, 1], [4, 5]], [[0, 1], [4, 5]]]]
    rollout = [[[[1, 0], [4, 6]], [[7, 8], [5, 9]]]]
    samples = routed(train, rollout, [[1, 1]])
    assert token_overlap(samples).tolist() == [[3 / 4, 1 / 4]]
    assert smallest_overlap(samples.train_experts[0], samples.rollout_experts[0]) == 1 / 4


def test_without_tokens_nothing_differs():
    assert smallest_overlap(*np.zeros((2, 0, 3, 4), np.int16)) == 1


def test_masked_tokens_do_not_count():
    samples = routed([[[[0, 1]], [[0, 1]]]], [[[[0, 1]], [[7, 8]]]], [[1, 0]])
    assert router_mismatch(samples)["router_mismatch"] == 0
    assert token_overlap(samples).tolist() == [[1, 1]]


@pytest.mark.parametrize("missing", ["train", "rollout"])
def test_without_the_experts_of_both_sides_nothing_is_claimed(missing):
    experts = {"train": [[[[0, 1]]]], "rollout": [[[[0, 2]]]], missing: None}
    samples = routed(experts["train"], experts["rollout"], [[1]])
    assert set(router_mismatch(samples).values()) == {None}
    assert token_overlap(samples) is None
