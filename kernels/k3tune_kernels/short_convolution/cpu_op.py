"""The short convolution and its gradients on the native CPU kernels, for bf16 and fp32.

Strided operands are copied first; ``isa`` names an instruction set, None is the best one.
"""

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.cpu import library


class ShortConvolutionCpu(torch.autograd.Function):
    """Saves the operands alone: the sum before SiLU is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: torch.Tensor,
        past_BPC: torch.Tensor,
        weight_C1S: torch.Tensor,
        reach_BTP: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_BTC, past_BPC, weight_C1S, reach_BTP)
        return forward(x_BTC, past_BPC, weight_C1S, reach_BTP)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, needs_past, needs_weight, _ = ctx.needs_input_grad
        gradients = backward(
            grad_BTC, *ctx.saved_tensors, needs_past=needs_past, needs_weight=needs_weight
        )
        return (*gradients, None)


def forward(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """As :func:`k3tune_kernels.short_convolution.short_convolution`."""
    operands = _operands(x_BTC, past_BPC, weight_C1S, reach_BTP)
    call, out_BTC = _call(*operands, isa), torch.empty_like(operands[0])
    call.out = out_BTC.data_ptr()
    library.check(library.load().k3_short_convolution(ctypes.addressof(call)))
    return out_BTC


def backward(
    grad_BTC: torch.Tensor,
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
    *,
    needs_past: bool,
    needs_weight: bool,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of inputs, past and weight, the latter two None where they are not needed."""
    operands = x_BTC, past_BPC, taps_SC, _ = _operands(x_BTC, past_BPC, weight_C1S, reach_BTP)
    grad_BTC, dx_BTC = grad_BTC.contiguous(), torch.empty_like(x_BTC)
    d_past_BPC = torch.empty_like(past_BPC) if needs_past else None
    d_taps_SC = torch.empty_like(taps_SC) if needs_weight else None
    call = _call(*operands, isa)
    call.grad, call.dx = grad_BTC.data_ptr(), dx_BTC.data_ptr()
    call.d_past = None if d_past_BPC is None else d_past_BPC.data_ptr()
    call.d_taps = None if d_taps_SC is None else d_taps_SC.data_ptr()
    library.check(library.load().k3_short_convolution_backward(ctypes.addressof(call)))
    return dx_BTC, d_past_BPC, None if d_taps_SC is None else d_taps_SC.T[:, None]


def _operands(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As the kernels read them: the taps with the channels adjacent."""
    taps_SC = weight_C1S.detach()[:, 0].T.contiguous()
    reach_BTP = None if reach_BTP is None else reach_BTP.contiguous()
    return x_BTC.contiguous(), past_BPC.contiguous(), taps_SC, reach_BTP


def _call(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    taps_SC: torch.Tensor,
    reach_BTP: torch.Tensor | None,
    isa: str | None,
) -> library.ShortConvolution:
    call = library.ShortConvolution()
    call.rows, call.tokens, call.channels = x_BTC.shape
    call.dtype = library.DTYPES[x_BTC.dtype]
    call.threads, call.isa = torch.get_num_threads(), library.isa_index(isa)
    call.x, call.past, call.taps = x_BTC.data_ptr(), past_BPC.data_ptr(), taps_SC.data_ptr()
    call.reach = None if reach_BTP is None else reach_BTP.data_ptr()
    return call
