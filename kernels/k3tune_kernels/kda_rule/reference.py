"""The gated delta rule token by token, in plain torch: the truth for the other forms.

Shapes: B rows, T tokens, H heads, K / V key / value head width.
"""

import torch
from torch import Tensor


def kda_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor,
    bounds: Tensor,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`k3tune_kernels.kda_rule.kda_rule`."""
    batch, length, *widths = k_BTHK.shape
    goes_on = torch.ones(batch * length, dtype=torch.bool, device=bounds.device)
    goes_on[bounds[:-1]] = False
    goes_on_BT = goes_on.view(batch, length)
    state = v_BTHV.new_zeros(batch, *widths, v_BTHV.shape[-1]) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(length):
        if t > 0:
            # not by a product: a document's NaN is its own
            state = state.where(goes_on_BT[:, t, None, None, None], 0.0)
        k, v = k_BTHK[:, t, :, :, None], v_BTHV[:, t, :, None, :]
        state = state * log_decay_BTHK[:, t].exp()[..., None]
        error = v - (k * state).sum(-2, keepdim=True)
        state = state + beta_BTH[:, t, :, None, None] * k * error
        outputs.append((q_BTHK[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=1), state
