"""What a token is drawn from, and the draw: every row of a batch with its own settings and stream.

Shape letters: ``B`` rows, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k3tune.rl.rollout import Sampling

# splitmix64: the step of a stream's counter, and the two multipliers of its mixer, as int64
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class RowSampling(NamedTuple):
    """The settings of each row.

    Attributes:
        temperature_B: fp32.
        top_p_B: fp64.
        top_k_B: int64, 0 for all.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> "RowSampling":
        """The settings of rows, in their order."""
        return cls(
            torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device),
            torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
        )


def log_distribution(logits_BV: Tensor, rows: RowSampling, *, filtered: bool) -> Tensor:
    """Log-probabilities of the distribution each row draws from.

    The logits are divided by the temperature; the ``top_k`` likeliest tokens stay (of equal ones
    those with lower ids); of these, in order, as many as are needed for ``top_p`` of their mass;
    the rest is renormalised.

    Args:
        logits_BV: any floating dtype.
        rows: the settings.
        filtered: whether any row has a top-k or top-p.

    Returns:
        fp32 ``[B, V]``, ``-inf`` at what is left out.
    """
    scaled_BV = logits_BV.float() / rows.temperature_B[:, None]
    if filtered:
        scaled_BV = _filtered(scaled_BV, rows)
    return scaled_BV.log_softmax(-1)


def _filtered(scaled_BV: Tensor, rows: RowSampling) -> Tensor:
    ordered_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    size = scaled_BV.shape[1]
    top_k_B = rows.top_k_B.masked_fill(rows.top_k_B == 0, size)
    behind_BV = torch.arange(size, device=scaled_BV.device) >= top_k_B[:, None]
    ordered_BV = ordered_BV.masked_fill(behind_BV, -torch.inf)
    mass_BV = ordered_BV.double().softmax(-1)
    before_BV = mass_BV.cumsum(-1) - mass_BV
    # the sum of all may round to less than 1, or reach it early: 1 leaves nothing out
    top_p_B1 = rows.top_p_B[:, None]
    beyond_BV = (before_BV >= top_p_B1) & (top_p_B1 < 1)
    ordered_BV = ordered_BV.masked_fill(beyond_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter_(1, order_BV, ordered_BV)


def uniforms(seeds_B: Tensor, counters_B: Tensor) -> Tensor:
    """Number ``counter`` of each seed's stream, fp64 in [0, 1): a function of the two alone.

    Args:
        seeds_B: int64, 0 and above.
        counters_B: int64, 0 and above.
    """
    # neighbouring seeds start far apart: their streams are stretches of one sequence
    mixed = _mixed(_mixed(seeds_B + _STEP) + (counters_B + 1) * _STEP)
    return ((mixed >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finalizer; int64 wraps, and a mask makes its shift an unsigned one."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def draw(log_probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token at each uniform's place in the cumulative distribution, int64 ``[B]``."""
    cumulative_BV = log_probs_BV.exp().double().cumsum(-1)
    places_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    # right: a token without mass has no place of its own
    return torch.searchsorted(cumulative_BV, places_B1, right=True)[:, 0].clamp(
        max=log_probs_BV.shape[1] - 1
    )
