"""Weights of tokens for the difference between the policy that is trained and the one that sampled.

Shape letters: ``B`` samples, ``T`` completion tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# e^20 is far beyond any cap, and finite
_MOST_LOG_RATIO = 20.0


class TokenWeights(NamedTuple):
    """What the loss of each token is multiplied with.

    Attributes:
        weights: ``[B, T]`` fp32; 0 where the correction takes a token out of the loss, and outside
            the mask.
        num_masked: tokens of the mask that it takes out, those with a logprob that is not finite
            on either side among them.
        num_truncated: tokens of the mask whose ratio it cut.
    """

    weights: Tensor
    num_masked: int
    num_truncated: int


def importance_weights(
    train_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, mode: str, cap: float
) -> TokenWeights:
    """Weights ``train / rollout`` probability of sampled tokens, cut or masked.

    With r = train - rollout: ``token_*`` modes weigh each token with w = e^r, ``sequence_*`` ones
    all tokens of a completion with the geometric mean w = e^(mean r), which does not grow with
    its length. ``*_truncate`` takes min(w, cap), ``*_mask`` w within [1 / cap, cap] and else 0.

    Args:
        train_BT, rollout_BT: logprobs of the sampled tokens, both of the distribution they were
            drawn from, nats; no gradient flows.
        mask_BT: non-zero at tokens that count.
        mode: of ``k3tune.arguments.IMPORTANCE_MODES``; ``none`` weighs all with 1.
        cap: above 1.
    """
    mask_BT = mask_BT.bool()
    train_BT, rollout_BT = train_BT.detach().float(), rollout_BT.detach().float()
    usable_BT = mask_BT & train_BT.isfinite() & rollout_BT.isfinite()
    ratio_BT = torch.where(usable_BT, train_BT - rollout_BT, 0.0)
    if mode.startswith("sequence"):
        length_B1 = usable_BT.sum(-1, keepdim=True).clamp(min=1)
        ratio_BT = (ratio_BT.sum(-1, keepdim=True) / length_B1).expand_as(ratio_BT)
    weights_BT = ratio_BT.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
    above_BT = weights_BT > cap
    truncated_BT = torch.zeros_like(usable_BT)
    if mode == "none":
        weights_BT = torch.ones_like(weights_BT)
    elif mode.endswith("truncate"):
        truncated_BT = above_BT
        weights_BT = weights_BT.clamp(max=cap)
    else:
        weights_BT = weights_BT.masked_fill(above_BT | (weights_BT < 1 / cap), 0.0)
    weights_BT = weights_BT * usable_BT
    return TokenWeights(
        weights_BT,
        int((mask_BT & (weights_BT == 0)).sum()),
        int((usable_BT & truncated_BT).sum()),
    )
