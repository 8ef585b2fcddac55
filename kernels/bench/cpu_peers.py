"""What the CPU kernels are measured against on one MoE layer with LoRA.

Shapes: N tokens, A active experts a token, D latent width, F expert width, E experts, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from moe import SITU, Operands

from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, moe_lora
from k3tune_kernels.mxfp4 import decode
from k3tune_kernels.situ_glu import situ_glu

Pass = Callable[[], Any]


def passes(
    o: Operands, forward: Callable[[], torch.Tensor], grad: torch.Tensor
) -> tuple[Pass, Pass]:
    """The forward alone, and the forward with every gradient."""
    leaves = (o.x_ND, o.weights_NA, *(tensor for pair in o.lora for tensor in pair[:2]))

    def forward_only() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, grad)

    return forward_only, both


def ours(o: Operands, backend: str) -> Callable[[], torch.Tensor]:
    """The op on a backend."""
    return lambda: moe_lora(
        o.x_ND, o.ids_NA, o.weights_NA, *o[3:6], MoELora(*o.lora), situ=SITU, backend=backend
    )


def resident(o: Operands) -> Callable[[], torch.Tensor]:
    """Expert by expert in torch, over weights decoded to x's dtype once: 4x the memory."""
    gate, up, down = (decode(w.packed, w.scale, o.x_ND.dtype).unbind(0) for w in o[3:6])

    def linear(x: torch.Tensor, weight: torch.Tensor, lora: LoraFactors, e: int) -> torch.Tensor:
        return x @ weight.T + lora.scaling * ((x @ lora.A[e].T) @ lora.B[e].T)

    def run() -> torch.Tensor:
        out = torch.zeros(o.x_ND.shape, dtype=torch.float32)
        for e in range(len(gate)):
            token, slot = (o.ids_NA == e).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            x = o.x_ND[token]
            hidden = situ_glu(
                linear(x, gate[e], o.lora[0], e),
                linear(x, up[e], o.lora[1], e),
                beta=SITU.beta,
                linear_beta=SITU.linear_beta,
            )
            y = linear(hidden, down[e], o.lora[2], e)
            out = out.index_add(0, token, y.float() * o.weights_NA[token, slot, None])
        return out.to(o.x_ND.dtype)

    return run


def kt_kernel(o: Operands, grad: torch.Tensor) -> tuple[Pass, Pass]:
    """kt-kernel's ``MXFP4_SFT``: the same layer with SwiGLU in SiTU's place, as it has no other.

    Raises:
        ImportError: if it is not installed.
    """
    from kt_kernel import KTMoEWrapper

    experts, hidden, half = o.gate.packed.shape
    rank = o.lora[0].A.shape[1]
    layer = KTMoEWrapper(
        layer_idx=0,
        num_experts=experts,
        num_experts_per_tok=o.ids_NA.shape[1],
        hidden_size=2 * half,
        moe_intermediate_size=hidden,
        gpu_experts_mask=None,
        cpuinfer_threads=torch.get_num_threads(),
        threadpool_count=1,
        weight_path="",
        chunked_prefill_size=max(len(o.x_ND), 32),
        method="MXFP4_SFT",
        mode="sft",
        lora_rank=rank,
        lora_alpha=o.lora[0].scaling * rank,
        group_size=32,
        zero_point=False,
        swiglu_limit=100.0,
    )

    def bf16_scale(weight: PackedWeight) -> list[torch.Tensor]:
        return list(torch.exp2(weight.scale.float() - 127).bfloat16().unbind(0))

    tensors: dict[str, list[torch.Tensor]] = {}
    for name, weight in zip(("gate", "up", "down"), o[3:6], strict=True):
        tensors |= {name: list(weight.packed.unbind(0)), f"{name}_scale": bf16_scale(weight)}
    factors = [tensor.detach().bfloat16().contiguous() for pair in o.lora for tensor in pair[:2]]
    layer.init_lora_weights(*factors, *map(torch.zeros_like, factors))
    layer.load_mxfp4_weights(tensors, torch.arange(experts))
    x, ids, weights = o.x_ND.detach(), o.ids_NA, o.weights_NA.detach().float()

    def forward(save: bool) -> torch.Tensor:
        return layer.forward(x, ids, weights, save_for_backward=save)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        forward(True)
        return layer.backward(grad)

    return lambda: forward(False), both
