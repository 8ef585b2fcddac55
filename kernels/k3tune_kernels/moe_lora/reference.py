"""The routed experts in plain torch: the truth for the kernels, and the path where none runs.

One expert is dequantised at a time, in the forward and again in the backward; no decoded weight
outlives its product. Matrix products run in the dtype of ``x``, SiTU-GLU and the weighted sum in
fp32 (fp64 for fp64).

Shapes: N tokens, A active experts a token, M = N * A routed rows, T rows of one expert, D model
(latent) dim, F expert hidden dim, E local experts, R LoRA rank, O outputs and I inputs of one
projection.
"""

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from k3tune_kernels.moe_lora.operands import LoraFactors, MoELora, PackedWeight, Situ
from k3tune_kernels.moe_lora.rounding import round_straight_through
from k3tune_kernels.moe_lora.routing import local_rows
from k3tune_kernels.mxfp4.reference import decode
from k3tune_kernels.situ_glu import situ_glu


def moe_lora_reference(
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
    hidden_rounding: str = "none",
) -> torch.Tensor:
    """:func:`k3tune_kernels.moe_lora.moe_lora` on operands that were checked.

    Args:
        hidden_rounding: what enters ``down`` is rounded to; ``x_ND`` comes rounded.
    """
    num_experts = gate.packed.shape[0]
    # Rows sorted by expert; id num_experts stands for "not here" and sorts last.
    rows_NA = local_rows(expert_ids_NA, num_experts, local_experts)
    order_M = rows_NA.flatten().argsort(stable=True)
    counts = rows_NA.flatten().bincount(minlength=num_experts + 1)[:num_experts].tolist()
    token_M = order_M[: sum(counts)] // rows_NA.shape[1]
    lora = _together(lora)
    with torch.autocast(x_ND.device.type, enabled=False):
        projections = [
            _expert_views(weight, factors, num_experts)
            for weight, factors in zip((gate, up, down), lora, strict=True)
        ]
        outputs = []
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            x_TD = x_ND[token_M[start : start + count]]
            gate_TF = _PackedLoraLinear.apply(x_TD, *projections[0][expert])
            up_TF = _PackedLoraLinear.apply(x_TD, *projections[1][expert])
            hidden_TF = situ_glu(
                gate_TF, up_TF, beta=situ.beta, linear_beta=situ.linear_beta, backend="reference"
            )
            hidden_TF = round_straight_through(hidden_TF, hidden_rounding)
            outputs.append(_PackedLoraLinear.apply(hidden_TF, *projections[2][expert]))
            start += count
        out_ND = _combine(x_ND, outputs, order_M, expert_ids_NA, expert_weights_NA)
        if not outputs:
            factors = [t for f in lora if f is not None for t in (f.A, f.B)]
            out_ND = _Touch.apply(out_ND, x_ND, expert_weights_NA, *factors)
    return out_ND.to(x_ND.dtype)


def _together(lora: MoELora) -> MoELora:
    """The factors, whose gradients will be ready at once and in this order, whatever was routed.

    What averages gradients over processes as they come relies on one order in all of them, and a
    process without any row has another graph.
    """
    factors = [t for f in lora if f is not None for t in (f.A, f.B)]
    if not factors:
        return lora
    together = iter(_Together.apply(*factors))
    return MoELora(
        *(None if f is None else f._replace(A=next(together), B=next(together)) for f in lora)
    )


def _expert_views(
    weight: PackedWeight, factors: LoraFactors | None, num_experts: int
) -> list[tuple[Any, ...]]:
    """Per expert: packed, scale, A, B, scaling (the last three ``None`` without LoRA)."""
    packed, scale = weight.packed.unbind(0), weight.scale.unbind(0)
    if factors is None:
        return [(p, s, None, None, None) for p, s in zip(packed, scale, strict=True)]
    # unbind, not indexing: its backward stacks all gradients once, with zeros for idle experts.
    A, B = factors.A.unbind(0), factors.B.unbind(0)
    A = A * num_experts if len(A) == 1 else A
    B = B * num_experts if len(B) == 1 else B
    scaling = factors.scaling
    per_expert = scaling.unbind(0) if isinstance(scaling, torch.Tensor) else [scaling] * num_experts
    return list(zip(packed, scale, A, B, per_expert, strict=True))


def _combine(
    x_ND: torch.Tensor,
    outputs: list[torch.Tensor],
    order_M: torch.Tensor,
    expert_ids_NA: torch.Tensor,
    expert_weights_NA: torch.Tensor,
) -> torch.Tensor:
    """Sum each token's expert outputs in the order of the experts' ids."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    out_ND = torch.zeros(x_ND.shape, dtype=dtype, device=x_ND.device)
    if not outputs:
        return out_ND
    routed_MD = torch.cat(outputs)
    slot_NA = expert_ids_NA.argsort(dim=1, stable=True)
    place_NA = order_M.argsort().view_as(expert_ids_NA).gather(1, slot_NA)
    weights_NA = expert_weights_NA.to(dtype).gather(1, slot_NA)
    # A row that is not here sorted past the last output.
    here_NA = place_NA < routed_MD.shape[0]
    place_NA = place_NA.clamp(max=routed_MD.shape[0] - 1)
    for a in range(expert_ids_NA.shape[1]):
        term_ND = weights_NA[:, a : a + 1] * routed_MD[place_NA[:, a]].to(dtype)
        out_ND = out_ND + torch.where(here_NA[:, a : a + 1], term_ND, 0)
    return out_ND


class _PackedLoraLinear(torch.autograd.Function):
    """``x @ W.T + scaling * (x @ A.T) @ B.T``, W decoded when needed and never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        A: torch.Tensor | None,
        B: torch.Tensor | None,
        scaling: float | torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TI, packed, scale, A, B)
        ctx.scaling = scaling
        y_TO = x_TI @ decode(packed, scale, x_TI.dtype).T
        if A is None or B is None or scaling is None:
            return y_TO
        return y_TO + ((x_TI @ A.to(x_TI.dtype).T) * scaling) @ B.to(x_TI.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, packed, scale, A, B = ctx.saved_tensors
        dx = dA = dB = None
        # A backward called under autocast would run these products in its dtype.
        with torch.autocast(x_TI.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = dy_TO @ decode(packed, scale, x_TI.dtype)
            if A is not None:
                shrunk_TR = (dy_TO @ B.to(x_TI.dtype)) * ctx.scaling
                if dx is not None:
                    dx = dx + shrunk_TR @ A.to(x_TI.dtype)
                if ctx.needs_input_grad[3]:
                    dA = (shrunk_TR.T @ x_TI).to(A.dtype)
                if ctx.needs_input_grad[4]:
                    xA_TR = (x_TI @ A.to(x_TI.dtype).T) * ctx.scaling
                    dB = (dy_TO.T @ xA_TR).to(B.dtype)
        return dx, None, None, dA, dB, None


class _Together(torch.autograd.Function):
    """The tensors as they are; their gradients wait for each other, those of unused ones are 0."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


class _Touch(torch.autograd.Function):
    """The first tensor, made to depend on the others with a gradient of zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: torch.Tensor, *touched: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*touched)
        return out.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return (
            grad if ctx.needs_input_grad[0] else None,
            *(
                torch.zeros_like(t) if wanted else None
                for t, wanted in zip(ctx.saved_tensors, needed, strict=True)
            ),
        )
