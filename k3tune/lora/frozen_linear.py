"""A frozen linear layer with a LoRA update, where both have one dtype: sums in place, both ways.

Shape letters: ``N`` tokens, ``R`` LoRA rank, ``I`` inputs, ``O`` outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from k3tune.model.layers import without_autocast


class FrozenLinearWithLora(torch.autograd.Function):
    """``y = base(x) + s B A x`` and, for a gradient g of y::

        dx = W^T g + A^T dn,   dA = dn x^T,   dB = s g (A x)^T     with dn = s B^T g

    Autograd's own would make each product a tensor of its own and add them. Saved are x, which the
    layers that share it save too, and A x. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_RI: Tensor, B_OR: Tensor, base: nn.Linear, scaling: float
    ) -> Tensor:
        y = base(x)
        narrow_NR = add_update(y, x, A_RI, B_OR, scaling)
        # the weight as it is now: where the trunk is sharded the layer has none in between
        ctx.save_for_backward(x, narrow_NR, A_RI, B_OR, base.weight)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow_NR, A_RI, B_OR, weight_OI = ctx.saved_tensors
        needs_x, needs_A, needs_B = ctx.needs_input_grad[:3]
        grad_NO = grad.reshape(-1, len(B_OR))
        dx = dA_RI = dB_OR = None
        with without_autocast(grad):
            d_narrow_NR = torch.mm(grad_NO, B_OR).mul_(ctx.scaling)
            if needs_x:
                dx = torch.mm(grad_NO, weight_OI).addmm_(d_narrow_NR, A_RI).view(x.shape)
            if needs_A:
                dA_RI = torch.mm(d_narrow_NR.t(), x.reshape(-1, x.shape[-1]))
            if needs_B:
                dB_OR = torch.mm(grad_NO.t(), narrow_NR).mul_(ctx.scaling)
        return dx, dA_RI, dB_OR, None, None


def add_update(y: Tensor, x: Tensor, A_RI: Tensor, B_OR: Tensor, scaling: float) -> Tensor:
    """Add ``scaling * B A x`` to ``y`` in place, and return ``A x``, ``[N, R]``.

    Args:
        y: ``[..., O]``, contiguous and nobody else's.
        x: ``[..., I]``.
    """
    narrow_NR = F.linear(x.reshape(-1, x.shape[-1]), A_RI)
    y.view(-1, len(B_OR)).addmm_(narrow_NR, B_OR.t(), alpha=scaling)
    return narrow_NR
