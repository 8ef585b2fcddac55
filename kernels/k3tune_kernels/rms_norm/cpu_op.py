"""RMSNorm and its gradients on the native CPU kernels: bf16 and fp32, fp32 with a gate.

Strided operands are copied first; ``isa`` names an instruction set, None is the best one.
"""

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.cpu import library


def rms_norm_cpu(
    x: torch.Tensor, weight_D: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """:func:`k3tune_kernels.rms_norm.rms_norm`, or ``gated_rms_norm`` where there is a gate."""
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight_D, gate, eps)
    return forward(x, weight_D, gate, eps)


class _RmsNorm(torch.autograd.Function):
    """Saves the operands alone: the root mean square is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, gate: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_D, gate)
        ctx.eps = eps
        return forward(x, weight_D, gate, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_D, gate = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        gradients = backward(grad, x, weight_D, gate, ctx.eps, needs_weight=needs_weight)
        return (*gradients, None)


def forward(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """As :func:`rms_norm_cpu`, not differentiable."""
    operands = _contiguous(x, weight_D, gate)
    call, out = _call(*operands, eps, isa), torch.empty_like(operands[0])
    call.out = out.data_ptr()
    library.check(library.load().k3_rms_norm(ctypes.addressof(call)))
    return out


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    *,
    needs_weight: bool,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, of the weight where it is needed, and of the gate where there is one."""
    operands = x, weight_D, gate = _contiguous(x, weight_D, gate)
    grad, dx = grad.contiguous(), torch.empty_like(x)
    d_weight_D = torch.empty_like(weight_D, dtype=torch.float32) if needs_weight else None
    d_gate = None if gate is None else torch.empty_like(gate)
    call = _call(*operands, eps, isa)
    call.grad, call.dx = grad.data_ptr(), dx.data_ptr()
    call.d_weight = None if d_weight_D is None else d_weight_D.data_ptr()
    call.d_gate = None if d_gate is None else d_gate.data_ptr()
    library.check(library.load().k3_rms_norm_backward(ctypes.addressof(call)))
    return dx, None if d_weight_D is None else d_weight_D.to(weight_D.dtype), d_gate


def _contiguous(
    x: torch.Tensor, weight_D: torch.Tensor, gate: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return x.contiguous(), weight_D.contiguous(), None if gate is None else gate.contiguous()


def _call(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    isa: str | None,
) -> library.RmsNorm:
    call = library.RmsNorm()
    call.tokens, call.dim, call.eps = x.shape[:-1].numel(), x.shape[-1], eps
    call.dtype = library.DTYPES[x.dtype]
    call.threads, call.isa = torch.get_num_threads(), library.isa_index(isa)
    call.x, call.weight = x.data_ptr(), weight_D.data_ptr()
    call.gate = None if gate is None else gate.data_ptr()
    return call
