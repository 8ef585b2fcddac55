"""What :func:`k3tune_kernels.moe_lora.moe_lora` takes, and the checks on it.

Shapes: N tokens, D model (latent) dim, F expert hidden dim, E local experts, A active experts a
token, R LoRA rank, O outputs and I inputs of one projection.
"""

from typing import NamedTuple

import torch

from k3tune_kernels.mxfp4.reference import check_packed

PROJECTIONS = ("gate", "up", "down")


class PackedWeight(NamedTuple):
    """One frozen MXFP4 projection of all local experts.

    ``packed`` is uint8 ``[E, O, I/2]``, ``scale`` uint8 ``[E, O, I/32]``.
    """

    packed: torch.Tensor
    scale: torch.Tensor


class LoraFactors(NamedTuple):
    """LoRA of one projection: ``y += scaling * (x @ A.T) @ B.T``.

    ``A`` is ``[E or 1, R, I]`` and ``B`` ``[E or 1, O, R]``; a leading 1 is shared by all experts.
    ``scaling`` is alpha / rank: a number, or a tensor ``[E]`` where experts differ (their ranks
    then padded with zeros).
    """

    A: torch.Tensor
    B: torch.Tensor
    scaling: float | torch.Tensor


class MoELora(NamedTuple):
    """LoRA of the expert projections; ``None`` where there is none."""

    gate: LoraFactors | None = None
    up: LoraFactors | None = None
    down: LoraFactors | None = None


class Situ(NamedTuple):
    """Bounds of SiTU-GLU: ``beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)``."""

    beta: float
    linear_beta: float


def check_operands(
    x_ND: torch.Tensor,
    expert_ids_NA: torch.Tensor,
    expert_weights_NA: torch.Tensor,
    weights: tuple[PackedWeight, PackedWeight, PackedWeight],
    lora: MoELora,
    local_experts: torch.Tensor | None,
) -> None:
    """Raise ``ValueError`` where shapes, dtypes or (on CPU tensors) expert ids do not fit."""
    if x_ND.dim() != 2 or not x_ND.is_floating_point():
        raise ValueError(
            f"x: expected floating [N, D], found {x_ND.dtype} {tuple(x_ND.shape)}; flatten tokens"
        )
    num_tokens, dim = x_ND.shape
    if expert_ids_NA.dim() != 2 or expert_ids_NA.shape[0] != num_tokens:
        raise ValueError(
            f"expert_ids: expected [{num_tokens}, A], found {tuple(expert_ids_NA.shape)}"
        )
    if expert_ids_NA.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_ids: expected int32 or int64, found {expert_ids_NA.dtype}")
    if expert_weights_NA.shape != expert_ids_NA.shape:
        raise ValueError(
            f"expert_weights: expected the shape of expert_ids {tuple(expert_ids_NA.shape)}, "
            f"found {tuple(expert_weights_NA.shape)}"
        )
    for name, weight in zip(PROJECTIONS, weights, strict=True):
        if weight.packed.dim() != 3:
            raise ValueError(
                f"{name}: expected packed [E, O, I/2], found {tuple(weight.packed.shape)}"
            )
        check_packed(name, weight.packed, weight.scale)
    num_experts, hidden, half_dim = weights[0].packed.shape
    shapes = [tuple(weight.packed.shape) for weight in weights]
    expected = [(num_experts, hidden, dim // 2)] * 2 + [(num_experts, dim, hidden // 2)]
    if shapes != expected or half_dim * 2 != dim:
        raise ValueError(
            f"for x {tuple(x_ND.shape)} and {num_experts} experts of width {hidden} expected "
            f"packed gate, up, down of {expected}, found {shapes}"
        )
    sizes = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    for name, factors in zip(PROJECTIONS, lora, strict=True):
        if factors is not None:
            _check_factors(name, factors, num_experts, *sizes[name])
    _check_ids(expert_ids_NA, num_experts, local_experts)


def _check_factors(
    name: str, factors: LoraFactors, num_experts: int, out_dim: int, in_dim: int
) -> None:
    A, B, scaling = factors
    if A.dim() != 3 or B.dim() != 3 or A.shape[1] != B.shape[2] or A.shape[1] < 1:
        raise ValueError(
            f"lora.{name}: expected A [E or 1, R, I] and B [E or 1, O, R], "
            f"found {tuple(A.shape)} and {tuple(B.shape)}"
        )
    if A.shape[2] != in_dim or B.shape[1] != out_dim:
        raise ValueError(
            f"lora.{name}: expected I = {in_dim} and O = {out_dim}, "
            f"found {A.shape[2]} and {B.shape[1]}"
        )
    if A.shape[0] not in (1, num_experts) or B.shape[0] not in (1, num_experts):
        raise ValueError(
            f"lora.{name}: expected factors of 1 or {num_experts} experts, "
            f"found {A.shape[0]} and {B.shape[0]}"
        )
    if isinstance(scaling, torch.Tensor) and scaling.shape != (num_experts,):
        raise ValueError(
            f"lora.{name}: expected a scaling tensor of [{num_experts}], "
            f"found {tuple(scaling.shape)}"
        )


def _check_ids(
    expert_ids_NA: torch.Tensor, num_experts: int, local_experts: torch.Tensor | None
) -> None:
    if local_experts is not None:
        if local_experts.shape != (num_experts,) or local_experts.dtype != torch.int64:
            raise ValueError(
                f"local_experts: expected int64 [{num_experts}] (one global id a row), "
                f"found {local_experts.dtype} {tuple(local_experts.shape)}"
            )
        return
    # On a GPU reading the ids would stall the stream; there an id out of range contributes nothing.
    if expert_ids_NA.device.type == "cpu" and expert_ids_NA.numel():
        low, high = (int(bound) for bound in expert_ids_NA.aminmax())
        if low < 0 or high >= num_experts:
            raise ValueError(
                f"expert_ids: expected ids in 0..{num_experts - 1}, found {low}..{high}; "
                "pass local_experts if these are global ids"
            )
