"""Operands for the tests of ``attention_residual``, and an fp64 oracle of its own.

A case is a list of leaves (the sources, the norm weight, the query weight) and a gradient of the
mix; results are the mix and the gradients of the leaves.
"""

import torch

from k3tune_kernels.attention_residual import attention_residual

EPS = 1e-5


def inputs(
    num_sources: int, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sources of growing size, so that the normalization matters, and scores of about 2."""
    generator = torch.Generator().manual_seed(num_sources)
    sources = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + i)
        for i in range(num_sources)
    ]
    norm_weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    query_weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    query_weight *= 2 / shape[-1] ** 0.5
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [x.to(dtype).requires_grad_() for x in (*sources, norm_weight, query_weight)], grad


def names(num_sources: int) -> list[str]:
    """What :func:`run` and :func:`exact` return, in order."""
    return ["mix", *(f"ds{i}" for i in range(num_sources)), "dnorm", "dquery"]


def run(
    leaves: list[torch.Tensor], grad: torch.Tensor, backend: str = "reference"
) -> tuple[torch.Tensor, ...]:
    """The op's mix and the gradients of all leaves."""
    *sources, norm_weight, query_weight = leaves
    mix = attention_residual(sources, norm_weight, query_weight, eps=EPS, backend=backend)
    return mix, *torch.autograd.grad(mix, leaves, grad)


def exact(leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same from the equation as written, by autograd in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    *sources, norm_weight, query_weight = leaves
    stack = torch.stack(sources)
    scores = (stack * norm_weight * query_weight).sum(-1)
    scores = scores * torch.rsqrt(stack.square().mean(-1) + EPS)
    mix = (torch.softmax(scores, 0)[..., None] * stack).sum(0)
    return mix, *torch.autograd.grad(mix, leaves, grad.double())
