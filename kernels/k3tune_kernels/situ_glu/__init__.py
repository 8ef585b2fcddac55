"""SiTU-GLU, the gated activation of every K3 feed-forward block."""

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels import dispatch
from k3tune_kernels.situ_glu import reference

__all__ = ["situ_glu"]

# the native kernels have no tail
_CPU_VALUES = 32


def _implementation(backend: str) -> ModuleType:
    if backend == "reference":
        return reference
    if backend == "cpu":
        from k3tune_kernels.situ_glu import cpu_kernels

        return cpu_kernels
    from k3tune_kernels.situ_glu import triton_kernels

    return triton_kernels


class _SituGlu(torch.autograd.Function):
    """Saves gate and up in their own dtype: the fp32 intermediates are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        beta: float,
        linear_beta: float,
        backend: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.settings = beta, linear_beta, backend
        return _implementation(backend).forward(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, linear_beta, backend = ctx.settings
        d_gate, d_up = _implementation(backend).backward(grad, gate, up, beta, linear_beta)
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        return (d_gate if needs_gate else None, d_up if needs_up else None, None, None, None)


def situ_glu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    beta: float,
    linear_beta: float,
    backend: str = "auto",
) -> torch.Tensor:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``, elementwise.

    Args:
        gate, up: tensors of one shape, floating dtype and device.
        beta, linear_beta: positive bounds of the two branches (4 and 25 in K3), so that
            ``|output| < beta * linear_beta``.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        Same shape and dtype as the inputs; computed in fp32 (fp64 for fp64 inputs).
        Differentiable in gate and up.

    Raises:
        ValueError: if the inputs differ in shape or dtype, a bound is not positive, or the
            backend cannot run here.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"situ_glu expects gate and up of one shape and dtype, got {tuple(gate.shape)} "
            f"{gate.dtype} and {tuple(up.shape)} {up.dtype}; cast or reshape one of them"
        )
    if not (beta > 0 and linear_beta > 0):
        raise ValueError(
            f"situ_glu expects positive bounds, got beta={beta} and linear_beta={linear_beta}"
        )
    cpu_limit = None
    if gate.numel() % _CPU_VALUES:
        cpu_limit = f"its CPU kernel takes a multiple of {_CPU_VALUES} values, found {gate.numel()}"
    chosen = dispatch.choose("situ_glu", backend, gate, up, cpu_limit=cpu_limit)
    if not torch.is_grad_enabled():
        return _implementation(chosen).forward(gate, up, beta, linear_beta)
    return _SituGlu.apply(gate, up, beta, linear_beta, chosen)
