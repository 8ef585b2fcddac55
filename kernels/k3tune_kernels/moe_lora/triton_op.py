"""The op over Triton kernels: one autograd function for the whole of it.

Forward: shrink x for gate and up, gate+up+SiTU, shrink, down, combine. Backward: gate and up again
(unless kept), shrink dy, dh+dSiTU, shrink, dx, combine, and Gram products for the factors. Saved
are x, the routing and the shrink results.

Shapes: N tokens, A active experts a token, M = N * A routed rows, D model (latent) dim, E local
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.moe_lora.launcher import Adapter, Launcher
from k3tune_kernels.moe_lora.operands import PROJECTIONS, MoELora, PackedWeight, Situ
from k3tune_kernels.moe_lora.routing import Routing, route


@dataclass(frozen=True)
class Settings:
    """What a call passes besides tensors; ``scalings`` are alpha / rank of gate, up, down."""

    situ: Situ
    scalings: tuple[float | torch.Tensor | None, ...]
    keep_gate_up: bool


def moe_lora_triton(
    x_ND: torch.Tensor,
    expert_ids_NA: torch.Tensor,
    expert_weights_NA: torch.Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    lora: MoELora,
    *,
    situ: Situ,
    local_experts: torch.Tensor | None,
    keep_gate_up: bool,
) -> torch.Tensor:
    """:func:`k3tune_kernels.moe_lora.moe_lora` on operands that were checked."""
    for name, weight in zip(PROJECTIONS, (gate, up, down), strict=True):
        if not (weight.packed.is_contiguous() and weight.scale.is_contiguous()):
            raise ValueError(
                f"{name}: the Triton kernels expect contiguous packed and scale, found strides "
                f"{weight.packed.stride()} and {weight.scale.stride()}; make them so once, when "
                "they are loaded"
            )
    scalings = tuple(None if f is None else f.scaling for f in lora)
    factors = [t for f in lora for t in ((None, None) if f is None else (f.A, f.B))]
    settings = Settings(situ, scalings, keep_gate_up)
    with torch.cuda.device_of(x_ND):
        routing = route(expert_ids_NA, gate.packed.shape[0], local_experts)
        return _MoeLora.apply(
            settings, x_ND, expert_weights_NA, *routing, *gate, *up, *down, *factors
        )


class _MoeLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        x_ND: torch.Tensor,
        weights_NA: torch.Tensor,
        *tensors: Any,
    ) -> torch.Tensor:
        x_ND = x_ND.contiguous()
        ctx.settings = settings
        if weights_NA.numel() == 0:
            ctx.save_for_backward(x_ND, weights_NA, *tensors, *[None] * 6)
            return torch.zeros_like(x_ND)
        launcher, routing = _launcher(settings, x_ND, tensors)
        gate_narrow, up_narrow = launcher.shrink_x()
        hidden = launcher.rows(launcher.F)
        gate, up = None, None
        if settings.keep_gate_up:
            gate, up = launcher.rows(launcher.F), launcher.rows(launcher.F)
        launcher.gate_up(gate_narrow, up_narrow, gate, up, hidden)
        down_narrow = launcher.shrink(hidden, launcher.lora[2], gather=False, transposed=False)
        rows_MD = launcher.down_forward(hidden, down_narrow)
        kept_hidden = hidden if settings.keep_gate_up else None
        kept = (gate_narrow, up_narrow, down_narrow, gate, up, kept_hidden)
        ctx.save_for_backward(x_ND, weights_NA, *tensors, *kept)
        return launcher.combine(rows_MD, weights_NA.float().gather(1, routing.slot_NA))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, weights_NA, *tensors = ctx.saved_tensors
        *tensors, gate_narrow, up_narrow, down_narrow, gate, up, hidden = tensors
        factors = tensors[-6:]
        needed = ctx.needs_input_grad
        no_grads = (None,) * (len(tensors) - 6)
        if weights_NA.numel() == 0:
            zeros = [
                torch.zeros_like(t) if wanted else None
                for t, wanted in zip(factors, needed[-6:], strict=True)
            ]
            dx = torch.zeros_like(x_ND) if needed[1] else None
            return None, dx, torch.zeros_like(weights_NA), *no_grads, *zeros
        with torch.cuda.device_of(x_ND):
            launcher, routing = _launcher(ctx.settings, x_ND, tensors)
            dy_ND = dy_ND.to(x_ND.dtype).contiguous()
            if gate is None:
                gate, up = launcher.rows(launcher.F), launcher.rows(launcher.F)
                # Of unrounded gate and up, as in the forward; only the gradient of A needs it.
                hidden = launcher.rows(launcher.F) if needed[-2] else None
                launcher.gate_up(gate_narrow, up_narrow, gate, up, hidden)
            else:
                # The kernel works in place; what was saved must survive a second backward.
                gate, up = gate.clone(), up.clone()
            weight_M = weights_NA.float().flatten()[routing.order_M]
            dy_narrow = launcher.shrink(dy_ND, launcher.lora[2], gather=True, transposed=True)
            d_weight_M = launcher.down_backward(dy_ND, weight_M, dy_narrow, gate, up)
            d_gate, d_up = gate, up
            d_gate_narrow = launcher.shrink(d_gate, launcher.lora[0], gather=False, transposed=True)
            d_up_narrow = launcher.shrink(d_up, launcher.lora[1], gather=False, transposed=True)
            dx = None
            if needed[1]:
                dx = launcher.combine(launcher.dx(d_gate, d_up, d_gate_narrow, d_up_narrow), None)
            grams = (
                (d_gate_narrow, x_ND, True, None),
                (gate_narrow, d_gate, False, None),
                (d_up_narrow, x_ND, True, None),
                (up_narrow, d_up, False, None),
                (dy_narrow, hidden, False, weight_M),
                (down_narrow, dy_ND, True, weight_M),
            )
            d_factors = [
                launcher.gram(
                    factor, narrow, wide, of_A=index % 2 == 0, gather=gather, weight_M=weight
                )
                if needed[index - 6]
                else None
                for index, (factor, (narrow, wide, gather, weight)) in enumerate(
                    zip(factors, grams, strict=True)
                )
            ]
            d_weights = _by_slot(d_weight_M, routing).view_as(weights_NA).to(weights_NA.dtype)
        return None, dx, d_weights if needed[2] else None, *no_grads, *d_factors


def _launcher(
    settings: Settings, x_ND: torch.Tensor, tensors: Sequence[Any]
) -> tuple[Launcher, Routing]:
    """Launcher of a call from the tensors its autograd function carries."""
    routing = Routing(*tensors[:5])
    packed, factors = tensors[5:11], tensors[11:]
    num_experts = packed[0].shape[0]
    lora = [
        _adapter(A, B, scaling, num_experts, x_ND)
        for A, B, scaling in zip(factors[0::2], factors[1::2], settings.scalings, strict=True)
    ]
    return Launcher(x_ND, routing, packed, lora, settings.situ), routing


def _adapter(
    A: torch.Tensor | None,
    B: torch.Tensor | None,
    scaling: float | torch.Tensor | None,
    num_experts: int,
    x_ND: torch.Tensor,
) -> Adapter:
    if A is None or B is None or scaling is None:
        return Adapter(None, None, None, 0)
    # An fp32 kernel holds no bf16 value; a bf16 kernel rounds fp32 factors as it loads them.
    if x_ND.dtype is torch.float32:
        A, B = A.float(), B.float()
    if not isinstance(scaling, torch.Tensor):
        scaling = torch.full((num_experts,), scaling, dtype=torch.float32, device=x_ND.device)
    return Adapter(A.contiguous(), B.contiguous(), scaling.float().contiguous(), A.shape[1])


def _by_slot(values_M: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Sorted rows back to flat (token, slot) order; rows that are not local become zero."""
    here = torch.arange(values_M.shape[0], device=values_M.device) < routing.row_offsets[-1]
    values_M = torch.where(here, values_M, 0)
    return torch.zeros_like(values_M).scatter_(0, routing.order_M, values_M)
