"""The routed experts of LatentMoE over packed MXFP4 weights with LoRA: one differentiable op."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.moe_lora.operands import (
    LoraFactors,
    MoELora,
    PackedWeight,
    Situ,
    check_operands,
)
from k3tune_kernels.moe_lora.reference import moe_lora_reference
from k3tune_kernels.moe_lora.rounding import check_rounding, round_straight_through

__all__ = ["LoraFactors", "MoELora", "PackedWeight", "Situ", "moe_lora"]


def moe_lora(
    x_ND: torch.Tensor,
    expert_ids_NA: torch.Tensor,
    expert_weights_NA: torch.Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    lora: MoELora | None = None,
    *,
    situ: Situ,
    local_experts: torch.Tensor | None = None,
    keep_gate_up: bool = False,
    activation_rounding: str = "none",
    backend: str = "auto",
) -> torch.Tensor:
    """Weighted sum of each token's experts.

    ``out[n] = sum_a w[n, a] * E_{ids[n, a]}(x[n])`` with
    ``E(x) = down(SiTU(gate(x), up(x)))`` and each projection
    ``p(x) = x @ W.T + scaling * (x @ A.T) @ B.T``, W the decoded MXFP4 weight.

    Differentiable in ``x_ND``, ``expert_weights_NA`` and every LoRA factor, and in nothing else.
    Every LoRA factor that asks for a gradient gets one: zeros for experts that saw no token, also
    when no token is routed at all.

    Args:
        x_ND: tokens, ``[N, D]`` bf16 or fp32 (fp64: reference only); D a multiple of 32.
        expert_ids_NA: ``[N, A]`` int32 or int64, the experts of each token.
        expert_weights_NA: ``[N, A]`` floating, their weights.
        gate, up: :class:`PackedWeight` of ``[E, F, D]``.
        down: :class:`PackedWeight` of ``[E, D, F]``.
        lora: :class:`MoELora`; any subset of the projections, factors in fp32 or bf16.
        situ: :class:`Situ`, the bounds of the activation.
        local_experts: int64 ``[E]``, the global id of each local expert; ids of ``expert_ids_NA``
            that are not among them contribute nothing. ``None``: ids are rows of the weights.
        keep_gate_up: spend ``3 N A F`` values of memory to spare the backward of the Triton kernels
            one gate+up product (the reference always keeps what it needs).
        activation_rounding: ``"bf16"`` or ``"mxfp8"`` rounds what enters each projection and its
            LoRA, ``x`` and the hidden values, as an engine with such activations does; gradients
            pass as if it were not rounded. Reference and CPU kernels only.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``[N, D]`` in the dtype of ``x_ND``; expert outputs are summed in order of their ids in fp32
        (fp64 for fp64).

    Raises:
        ValueError: if shapes or dtypes do not fit, an id is out of range (found on CPU tensors
            only), or the machine lacks the backend asked for.
    """
    weights = (PackedWeight(*gate), PackedWeight(*up), PackedWeight(*down))
    factors = MoELora(*(None if f is None else LoraFactors(*f) for f in lora or MoELora()))
    check_operands(x_ND, expert_ids_NA, expert_weights_NA, weights, factors, local_experts)
    check_rounding(activation_rounding)
    rounds = activation_rounding != "none"
    limit = "its Triton kernels do not round activations" if rounds else None
    x_ND = round_straight_through(x_ND, activation_rounding)
    operands = (x_ND, expert_ids_NA, expert_weights_NA, *weights, factors)
    chosen = dispatch.choose("moe_lora", backend, *operands[:3], *weights[0], limit=limit)
    if chosen == "triton":
        from k3tune_kernels.moe_lora.triton_op import moe_lora_triton

        return moe_lora_triton(
            *operands, situ=Situ(*situ), local_experts=local_experts, keep_gate_up=keep_gate_up
        )
    compute = moe_lora_reference
    if chosen == "cpu":
        from k3tune_kernels.moe_lora.cpu_op import moe_lora_cpu

        compute = moe_lora_cpu
    return compute(
        *operands,
        situ=Situ(*situ),
        local_experts=local_experts,
        hidden_rounding=activation_rounding,
    )
