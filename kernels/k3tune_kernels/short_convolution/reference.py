"""The short convolution in plain torch, differentiated by autograd.

Shapes: B rows, T tokens, C channels, P inputs before a token.
"""

import torch
from torch.nn import functional as F


def short_convolution(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`k3tune_kernels.short_convolution.short_convolution`."""
    compute = torch.promote_types(x_BTC.dtype, torch.float32)
    padded = torch.cat([past_BPC, x_BTC], dim=1)
    length, taps_CS = x_BTC.shape[1], weight_C1S[:, 0]
    total = x_BTC.to(compute) * taps_CS[:, -1]
    for back in range(past_BPC.shape[1]):
        term = padded[:, back : back + length].to(compute) * taps_CS[:, back]
        total = total + (term if reach_BTP is None else term * reach_BTP[:, :, back, None])
    return F.silu(total).to(x_BTC.dtype)
