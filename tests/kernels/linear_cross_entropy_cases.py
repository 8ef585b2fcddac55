"""Operands for the tests of ``linear_cross_entropy``, and an fp64 oracle of its own."""

import torch

from k3tune_kernels.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
NAMES = ("nll", "dhidden", "dweight")

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    num_tokens: int, width: int, vocabulary: int, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden, weight, targets (every fifth ignored) and a gradient of the losses."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * 0.5
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    targets[1::5] = IGNORED
    grad = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        grad.to(torch.promote_types(dtype, torch.float32)),
    )


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    *,
    chunk_tokens: int = 7,
    backend: str = "reference",
) -> Results:
    """The op's losses and the gradients of hidden and weight."""
    nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, backend=backend)
    return nll, *torch.autograd.grad(nll, (hidden, weight), grad)


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor
) -> Results:
    """The same by torch's own cross-entropy in fp64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    nll = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return nll, *torch.autograd.grad(nll, (hidden, weight), grad.double())
