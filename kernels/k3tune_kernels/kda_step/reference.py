"""The KDA step in plain torch; fp32 inside, fp64 for fp64.

Shapes: B rows, H heads, K = V head width, W = H * K, P inputs before the newest.
"""

import torch
from torch.nn import functional as F

from k3tune_kernels.kda_step.operands import KdaConstants, KdaInputs


def kda_step(
    inputs: KdaInputs,
    constants: KdaConstants,
    window_BPC: torch.Tensor,
    state_BHKV: torch.Tensor,
) -> torch.Tensor:
    """:func:`k3tune_kernels.kda_step.kda_step`."""
    compute, dim = state_BHKV.dtype, state_BHKV.shape[-1]
    new_BC = torch.cat(inputs[:3], dim=-1)
    inputs_BPC = torch.cat([window_BPC, new_BC[:, None]], dim=1)
    window_BPC.copy_(inputs_BPC[:, 1:])
    # what enters the rule is rounded as the whole-sequence convolution rounds it
    mixed_BC = F.silu((inputs_BPC.to(compute) * constants.taps).sum(1)).to(new_BC.dtype)
    q, k, v = mixed_BC.to(compute).unflatten(-1, (3, -1, dim)).unbind(1)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + constants.unit_eps) for x in (q, k))
    q = q * dim**-0.5
    logit_BHK = (inputs.decay_logit.to(compute) + constants.decay_bias).unflatten(-1, (-1, dim))
    opening_BHK = (constants.decay_rate[:, None] * logit_BHK).sigmoid()
    decay = (constants.gate_lower_bound * opening_BHK).exp()
    # S'^T k and S^T q from one product with the old state
    old = (torch.stack([k, q], dim=-2) * decay[..., None, :]) @ state_BHKV
    written = inputs.beta_logit.to(compute).sigmoid()[..., None] * (v - old[..., 0, :])
    state_BHKV.mul_(decay[..., None]).addcmul_(k[..., None], written[..., None, :])
    output = old[..., 1, :] + (q * k).sum(-1, keepdim=True) * written
    normalised = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + constants.eps)
    gate_BHK = inputs.gate.to(compute).unflatten(-1, (-1, dim))
    gated_BHK = normalised * constants.norm_weight * gate_BHK.sigmoid()
    return gated_BHK.to(new_BC.dtype).flatten(1)
