"""What :func:`k3tune_kernels.kda_step.kda_step` takes.

Shapes: B rows, H heads, K head width, W = H * K, P inputs before the newest.
"""

from typing import NamedTuple

import torch


class KdaConstants(NamedTuple):
    """What a layer derives from its weights once.

    Attributes:
        taps: ``[P + 1, 3 W]`` of the convolutions of q, k and v side by side, the newest last.
        decay_rate: ``[H]``, ``exp(A_log)``.
        decay_bias: ``[W]``.
        norm_weight: ``[K]`` of the output's norm.
        gate_lower_bound: of the log-decay, below 0.
        eps: of the output's norm.
        unit_eps: added to the squared length of queries and keys.
    """

    taps: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm_weight: torch.Tensor
    gate_lower_bound: float
    eps: float
    unit_eps: float


class KdaInputs(NamedTuple):
    """The projections of one token of each row.

    Attributes:
        q, k, v, decay_logit: ``[B, W]``.
        beta_logit: ``[B, H]``.
        gate: ``[B, W]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay_logit: torch.Tensor
    beta_logit: torch.Tensor
    gate: torch.Tensor
