"""Operands for the tests of ``situ_glu``, and an fp64 oracle that shares no code with the op."""

import torch

from k3tune_kernels.situ_glu import situ_glu

BOUNDS = {"beta": 4.0, "linear_beta": 25.0}
NAMES = ("h", "dgate", "dup")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    shape: tuple[int, ...],
    *,
    gate_scale: float = 3.0,
    up_scale: float = 20.0,
    dtype: torch.dtype = torch.float32,
) -> Operands:
    """Gate, up and a gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    gate = torch.randn(shape, generator=generator, dtype=torch.float64) * gate_scale
    up = torch.randn(shape, generator=generator, dtype=torch.float64) * up_scale
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    return gate.to(dtype).requires_grad_(), up.to(dtype).requires_grad_(), grad.to(dtype)


def saturated(gate_sign: int, up_sign: int) -> Operands:
    """Gates beyond 40 and ups beyond 250, of the given signs."""
    gate = (gate_sign * torch.linspace(40.5, 60, 1000)).requires_grad_()
    up = (up_sign * torch.linspace(251, 400, 1000)).requires_grad_()
    return gate, up, torch.ones(1000)


def run(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, backend: str = "reference"
) -> Operands:
    """The op's output and both gradients."""
    out = situ_glu(gate, up, **BOUNDS, backend=backend)
    return out, *torch.autograd.grad(out, (gate, up), grad)


def exact(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Operands:
    """The same from the equation as written, by autograd in fp64."""
    gate, up = (x.detach().double().requires_grad_() for x in (gate, up))
    out = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    return out, *torch.autograd.grad(out, (gate, up), grad.double())
