"""How alike the two sides routed the prompts: the smallest share of a token's common experts."""

from types import SimpleNamespace

import torch

from k3tune.rl.rollout import Rollout
from k3tune.rl.routing import prompt_overlaps

# two MoE layers of two active experts; prompts are padded on the left to three tokens
LAYERS, ACTIVE, NUM_PROMPT = (1, 2), 2, 3
ROUTED = torch.tensor([[[0, 1], [2, 3]]] * 4, dtype=torch.int16)


def rollout(prompt_tokens, routed):
    """One sample; its last token predicts nothing and has no experts."""
    return Rollout(
        prompt_ids=tuple(range(prompt_tokens)),
        completion_ids=tuple(range(len(routed) + 1 - prompt_tokens)),
        logprobs=(0.0,) * (len(routed) + 1 - prompt_tokens),
        finish_reason="stop",
        adapter_version=0,
        routed_experts=routed,
    )


def overlaps(*rollouts):
    chosen = ROUTED.expand(len(rollouts), 4, 2, 2).clone()
    tap = SimpleNamespace(chosen=chosen, layers=LAYERS, num_active=ACTIVE)
    return prompt_overlaps(tap, rollouts, NUM_PROMPT)


def test_the_worst_prompt_token_counts_and_order_does_not():
    swapped = ROUTED[:3].clone()
    swapped[0, 1] = torch.tensor([9, 2])
    assert overlaps(rollout(3, ROUTED[:3].flip(-1)), rollout(3, swapped)) == [1.0, 0.75]


def test_the_last_prompt_token_belongs_to_the_completion():
    routed = ROUTED[:3].clone()
    routed[2] = 9
    assert overlaps(rollout(3, routed)) == [1.0]


def test_padding_on_the_left_is_not_compared():
    # as the trainer sees it: this row's first column is padding
    routed = ROUTED[:2].clone()
    assert overlaps(rollout(2, routed)) == [1.0]
    routed[0] = 9
    assert overlaps(rollout(2, routed)) == [0.0]


def test_a_prompt_of_one_token_has_nothing_to_compare():
    assert overlaps(rollout(1, ROUTED[:2])) == [1.0]
