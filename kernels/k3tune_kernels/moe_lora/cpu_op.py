"""The op over the native CPU kernels: one autograd function, one call of the library a pass.

Saved for the backward pass are the operands and ``s x A^T``, ``s h A^T`` of every routed row (the
width of a row is the sum of the ranks); gate and up are computed again.

Shapes: N tokens, A active experts a token, M = N * A routed rows, D model (latent) dim, E local
experts, R LoRA rank.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.cpu import library
from k3tune_kernels.moe_lora.operands import MoELora, PackedWeight, Situ
from k3tune_kernels.moe_lora.rounding import ROUNDINGS

Scaling = float | torch.Tensor | None


@dataclass(frozen=True)
class Settings:
    """What a call passes besides tensors that take part in autograd.

    ``scalings`` are alpha / rank of gate, up, down; ``isa`` numbers an instruction set, -1 is the
    best this CPU has; ``hidden_rounding`` numbers one of ROUNDINGS.
    """

    situ: Situ
    scalings: tuple[Scaling, Scaling, Scaling]
    isa: int
    hidden_rounding: int


def moe_lora_cpu(
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
    isa: str | None = None,
) -> torch.Tensor:
    """:func:`k3tune_kernels.moe_lora.moe_lora` on operands that were checked; x bf16 or fp32.

    Args:
        hidden_rounding: what enters ``down`` is rounded to; ``x_ND`` comes rounded.
        isa: name of an instruction set of :func:`k3tune_kernels.cpu.library.isas`; ``None`` is the
            best one.
    """
    scalings = [
        s.detach().float().contiguous() if isinstance(s, torch.Tensor) else s
        for s in (None if f is None else f.scaling for f in lora)
    ]
    settings = Settings(
        situ,
        (scalings[0], scalings[1], scalings[2]),
        library.isa_index(isa),
        ROUNDINGS.index(hidden_rounding),
    )
    factors = [t for f in lora for t in ((None, None) if f is None else (f.A, f.B))]
    ids_NA = expert_ids_NA.long().contiguous()
    packed = [_rows_in_one_piece(t) for weight in (gate, up, down) for t in weight]
    return _MoeLora.apply(
        settings, x_ND, expert_weights_NA, ids_NA, local_experts, *packed, *factors
    )


def _rows_in_one_piece(bytes_EOI: torch.Tensor) -> torch.Tensor:
    """Experts and rows may be strided; bytes within a row that are not adjacent are copied."""
    one_piece = bytes_EOI.stride(2) == 1 or bytes_EOI.shape[2] == 1
    return bytes_EOI if one_piece else bytes_EOI.contiguous()


class _MoeLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        x_ND: torch.Tensor,
        weights_NA: torch.Tensor,
        ids_NA: torch.Tensor,
        local_experts: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        call = _Call(settings, x_ND, weights_NA, ids_NA, local_experts, tensors)
        ranks = sum(call.moe.lora[i].rank for i in range(3))
        narrow_MR = torch.empty(ids_NA.numel(), ranks)
        out_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype)
        call.moe.narrow, call.moe.out = narrow_MR.data_ptr(), out_ND.data_ptr()
        call.run("k3_moe_forward")
        ctx.settings = settings
        ctx.save_for_backward(x_ND, weights_NA, ids_NA, local_experts, *tensors, narrow_MR)
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, weights_NA, ids_NA, local_experts, *tensors, narrow_MR = ctx.saved_tensors
        needed = ctx.needs_input_grad
        call = _Call(ctx.settings, x_ND, weights_NA, ids_NA, local_experts, tuple(tensors))
        dy_ND = dy_ND.to(x_ND.dtype).contiguous()
        call.moe.narrow, call.moe.d_out = narrow_MR.data_ptr(), dy_ND.data_ptr()
        dx = d_weights = None
        if needed[1]:
            dx = torch.empty(x_ND.shape, dtype=x_ND.dtype)
            call.moe.dx = dx.data_ptr()
        if needed[2]:
            d_weights = torch.empty(weights_NA.shape)
            call.moe.d_weights = d_weights.data_ptr()
        d_factors: list[torch.Tensor | None] = []
        for index, factor in enumerate(tensors[6:]):
            gradient = None
            if needed[index - 6]:
                gradient = torch.empty(factor.shape)
                setattr(call.moe.lora[index // 2], ("dA", "dB")[index % 2], gradient.data_ptr())
            d_factors.append(gradient)
        call.run("k3_moe_backward")
        typed = [
            None if gradient is None else gradient.to(factor.dtype)
            for gradient, factor in zip(d_factors, tensors[6:], strict=True)
        ]
        if d_weights is not None:
            d_weights = d_weights.to(weights_NA.dtype)
        return None, dx, d_weights, *[None] * 8, *typed


class _Call:
    """The C struct of a call, and the tensors its pointers need alive."""

    def __init__(
        self,
        settings: Settings,
        x_ND: torch.Tensor,
        weights_NA: torch.Tensor,
        ids_NA: torch.Tensor,
        local_experts: torch.Tensor | None,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> None:
        self.alive: list[torch.Tensor] = []
        self.moe = moe = library.Moe()
        moe.tokens, moe.dim = x_ND.shape
        moe.active = ids_NA.shape[1]
        moe.x_dtype = library.DTYPES[x_ND.dtype]
        moe.threads, moe.isa = torch.get_num_threads(), settings.isa
        moe.hidden_rounding = settings.hidden_rounding
        moe.beta, moe.linear_beta = settings.situ
        moe.x, moe.expert_ids = self._pointer(x_ND), self._pointer(ids_NA)
        moe.expert_weights = self._pointer(weights_NA.float())
        if local_experts is not None:
            moe.local_experts = self._pointer(local_experts)
        for index in range(3):
            packed, scale = tensors[2 * index : 2 * index + 2]
            assert packed is not None and scale is not None, "every projection has a weight"
            if index == 0:
                moe.experts, moe.hidden = packed.shape[:2]
            moe.weight[index] = library.Weight(
                packed.data_ptr(),
                scale.data_ptr(),
                *(packed.stride(0), packed.stride(1), scale.stride(0), scale.stride(1)),
            )
            A, B = tensors[6 + 2 * index : 8 + 2 * index]
            if A is not None and B is not None:
                self._set_factors(moe.lora[index], A, B, settings.scalings[index], moe.experts)

    def _set_factors(
        self,
        target: library.Factors,
        A: torch.Tensor,
        B: torch.Tensor,
        scaling: Scaling,
        experts: int,
    ) -> None:
        A, B = (t if t.dtype in library.DTYPES else t.float() for t in (A, B))
        target.A, target.B = self._pointer(A), self._pointer(B)
        target.A_dtype, target.B_dtype = library.DTYPES[A.dtype], library.DTYPES[B.dtype]
        target.rank = A.shape[1]
        # one expert's own factor and one shared by a single expert are the same thing
        target.A_shared, target.B_shared = (len(t) != experts for t in (A, B))
        if isinstance(scaling, torch.Tensor):
            target.scaling_E = self._pointer(scaling)
        else:
            assert scaling is not None, "factors come with a scaling"
            target.scaling = scaling

    def _pointer(self, tensor: torch.Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.alive.append(tensor)
        return tensor.data_ptr()

    def run(self, function: str) -> None:
        library.check(getattr(library.load(), function)(ctypes.addressof(self.moe)))
