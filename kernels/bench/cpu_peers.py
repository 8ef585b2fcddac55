"""What the CPU kernels are measured against on one MoE layer with LoRA.

Shapes: N tokens, A active experts a token, D latent width, F expert width, E experts, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from moe import SITU, Operands, operands

from k3tune_kernels.moe_lora import LoraFactors, MoELora, moe_lora
from k3tune_kernels.mxfp4 import decode
from k3tune_kernels.situ_glu import situ_glu

Pass = Callable[[], Any]


def with_tokens(sizes: dict[str, int], tokens: int, dtype: torch.dtype) -> Operands:
    """Operands of exactly so many tokens, routed to distinct experts at random."""
    o = operands(sizes | {"tokens_per_expert": 1}, torch.device("cpu"), dtype)
    drawn = torch.rand(tokens, sizes["experts"]).topk(sizes["active"], dim=1)
    return o._replace(
        x_ND=torch.randn(tokens, sizes["width"]).to(dtype).requires_grad_(),
        ids_NA=drawn.indices,
        weights_NA=torch.softmax(drawn.values, 1).requires_grad_(),
    )


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
