"""SiTU-GLU in plain torch: the value and both gradients.

With ``t = tanh(g/b)``, ``s = sigmoid(g)``, ``v = tanh(u/l)``::

    h     = b t s * l v
    dh/dg = ((1 - t^2) s + b t s (1 - s)) * l v
    dh/du = b t s * (1 - v^2)

Neither ``1 - t^2`` nor ``1 - s`` is computed by subtraction: both lose every digit where the
activation is saturated.
"""

import torch


def _squared_sech(x: torch.Tensor) -> torch.Tensor:
    """``1 - tanh(x)^2`` with full relative accuracy, from ``e = exp(-2|x|)``."""
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e).square()


def forward(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """The activation.

    Args:
        gate, up: tensors of one shape and dtype.
        beta, linear_beta: bounds of the gate branch and of the linear branch.

    Returns:
        Same shape and dtype; computed in fp32 (fp64 for fp64 inputs).
    """
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    bounded_gate = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (bounded_gate * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to gate and up, recomputed from the inputs.

    Args:
        grad: gradient of the output, same shape as ``gate`` and ``up``.
        gate, up, beta, linear_beta: as given to :func:`forward`.

    Returns:
        Two tensors of the inputs' shape and dtype.
    """
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(compute), up.to(compute), grad.to(compute)
    tanh_gate, sigmoid = torch.tanh(g / beta), torch.sigmoid(g)
    slope = _squared_sech(g / beta) + beta * tanh_gate * torch.sigmoid(-g)
    d_gate = d * (slope * sigmoid) * (linear_beta * torch.tanh(u / linear_beta))
    d_up = d * (beta * tanh_gate * sigmoid) * _squared_sech(u / linear_beta)
    return d_gate.to(gate.dtype), d_up.to(up.dtype)
