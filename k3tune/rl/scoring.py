"""Completions as the trainer scores them, in the form the monitor reads.

Shape letters: ``B`` samples, ``P`` tokens of the longest prompt, ``C`` of the longest completion.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3tune.monitor.samples import Samples, make_samples
from k3tune.rl.hooks import Scored
from k3tune.rl.objective import TokenWeights
from k3tune.rl.rollout import Rollout
from k3tune.rl.routing import prompt_overlaps, rollout_experts, trainer_experts

# int16 experts of a batch's tokens; of longer ones the monitor is told none
_MOST_EXPERT_BYTES = 256 << 20


def padded_batch(
    rollouts: Sequence[Rollout], pad_token_id: int, device: torch.device
) -> dict[str, Tensor]:
    """Prompts padded on the left and completions on the right, as TRL does it.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` ``[B, P]``, ``completion_ids`` and ``completion_mask``
        ``[B, C]``, int64.
    """
    num_prompt = max(len(rollout.prompt_ids) for rollout in rollouts)
    num_completion = max(len(rollout.completion_ids) for rollout in rollouts)
    prompts = torch.full((len(rollouts), num_prompt), pad_token_id)
    completions = torch.full((len(rollouts), num_completion), pad_token_id)
    prompt_mask, completion_mask = torch.zeros_like(prompts), torch.zeros_like(completions)
    for row, rollout in enumerate(rollouts):
        start, end = num_prompt - len(rollout.prompt_ids), len(rollout.completion_ids)
        prompts[row, start:] = torch.tensor(rollout.prompt_ids)
        prompt_mask[row, start:] = 1
        completions[row, :end] = torch.tensor(rollout.completion_ids)
        completion_mask[row, :end] = 1
    return {
        "prompt_ids": prompts.to(device),
        "prompt_mask": prompt_mask.to(device),
        "completion_ids": completions.to(device),
        "completion_mask": completion_mask.to(device),
    }


def padded_logprobs(logprobs: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Lists of log-probabilities as ``[B, C]`` fp64, 0 after each end."""
    padded = torch.zeros(like.shape, dtype=torch.float64)
    for row, values in enumerate(logprobs):
        padded[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return padded


def samples_of(
    scored: Scored, weights: TokenWeights | None, *, with_rollout_experts: bool
) -> Samples:
    """What the monitor reads of a batch.

    Args:
        scored: by the forward that trains.
        weights: of the importance correction.
        with_rollout_experts: the rollouts have theirs.
    """
    others: dict[str, Any] = {}
    size = scored.mask.numel() * len(scored.tap.layers) * scored.tap.num_active * 2
    if size <= _MOST_EXPERT_BYTES:
        num_prompt, num_completion = scored.prompt_tokens, scored.mask.shape[1]
        others["train_experts"] = trainer_experts(scored.tap, num_prompt)
        if with_rollout_experts:
            others |= {
                "rollout_experts": rollout_experts(scored.tap, scored.rollouts, num_completion),
                "prompt_overlap": prompt_overlaps(scored.tap, scored.rollouts, num_prompt),
            }
    if weights is not None:
        others["correction"] = weights.weights
    return make_samples(
        scored.logprobs,
        scored.sampled,
        scored.mask,
        scored.sample_ids,
        [rollout.adapter_version for rollout in scored.rollouts],
        token_ids=scored.completion_ids,
        entropy=scored.entropies,
        **others,
    )
