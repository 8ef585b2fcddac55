"""SiTU-GLU in Triton: the elementwise kernels, and the device functions other kernels reuse.

The equations are in ``reference.py``. Triton has no tanh of its own and a GPU's ``exp`` errs in
proportion to its argument, which is large exactly where the activation is saturated; so the
exponentials below reduce their argument first (see ``README.md``).
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024
# Triton 3.10 turns fp fusion off by default.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _exp_of_minus(a, SCALE: tl.constexpr):
    """``exp(-a / SCALE)`` for ``a >= 0``, within about an ulp of fp32 for any ``a``.

    With ``period = SCALE ln 2`` and ``a = n period + r`` the result is ``2^-n exp(-r / SCALE)``.
    The period is held as a 13-bit head, whose product with n is exact, and a tail.
    """
    PERIOD: tl.constexpr = SCALE * 0.6931471805599453
    SPREAD: tl.constexpr = PERIOD * 1099511627777.0
    HEAD: tl.constexpr = SPREAD - (SPREAD - PERIOD)
    TAIL: tl.constexpr = PERIOD - HEAD
    INVERSE_PERIOD: tl.constexpr = 1.0 / PERIOD
    INVERSE_SCALE: tl.constexpr = 1.0 / SCALE
    # already zero in fp32; without the bound an infinite a would become NaN
    LIMIT: tl.constexpr = SCALE * 150.0
    a = tl.where(a > LIMIT, LIMIT, a)
    n = tl.floor(a * INVERSE_PERIOD + 0.5)
    r = (a - n * HEAD) - n * TAIL
    return tl.exp2(-n) * tl.exp(-r * INVERSE_SCALE)


@triton.jit
def _tanh_and_slope(x, SCALE: tl.constexpr):
    """``tanh(x / SCALE)`` and ``1 - tanh(x / SCALE)^2``, both with full relative accuracy."""
    HALF: tl.constexpr = SCALE * 0.5
    INVERSE_SCALE: tl.constexpr = 1.0 / SCALE
    e = _exp_of_minus(tl.abs(x), HALF)
    y = x * INVERSE_SCALE
    z = y * y
    # minimax fit of (tanh(y)/y - 1) / y^2 on |y| <= 0.6, relative error 3e-9
    fit = -0.005895157651 * z + 0.02079597127
    fit = fit * z - 0.05378383015
    fit = fit * z + 0.1333192413
    fit = fit * z - 0.33333298
    large = (1.0 - e) / (1.0 + e)
    tanh = tl.where(z <= 0.36, y + y * z * fit, tl.where(x < 0, -large, large))
    return tanh, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _sigmoid_and_complement(x):
    """``sigmoid(x)`` and ``1 - sigmoid(x)``, both with full relative accuracy."""
    e = _exp_of_minus(tl.abs(x), 1.0)
    larger = 1.0 / (1.0 + e)
    smaller = e / (1.0 + e)
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def situ_value(g, u, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The activation of fp32 tiles."""
    tanh_gate, _ = _tanh_and_slope(g, BETA)
    sigmoid, _ = _sigmoid_and_complement(g)
    tanh_up, _ = _tanh_and_slope(u, LINEAR_BETA)
    return (BETA * tanh_gate * sigmoid) * (LINEAR_BETA * tanh_up)


@triton.jit
def situ_value_and_slopes(g, u, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The activation of fp32 tiles, and its derivatives with respect to g and u."""
    tanh_gate, slope_gate = _tanh_and_slope(g, BETA)
    sigmoid, complement = _sigmoid_and_complement(g)
    tanh_up, slope_up = _tanh_and_slope(u, LINEAR_BETA)
    bounded_gate = BETA * tanh_gate * sigmoid
    bounded_up = LINEAR_BETA * tanh_up
    d_gate = (slope_gate + BETA * tanh_gate * complement) * sigmoid * bounded_up
    return bounded_gate * bounded_up, d_gate, bounded_gate * slope_up


@triton.jit
def _situ_glu_fwd_kernel(
    gate, up, out, numel, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid ``(ceil(numel / BLOCK),)``: a program computes BLOCK consecutive values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    h = situ_value(g, u, BETA, LINEAR_BETA)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _situ_glu_bwd_kernel(
    grad,
    gate,
    up,
    d_gate,
    d_up,
    numel,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(numel / BLOCK),)``: a program computes BLOCK values of both gradients."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    _, slope_gate, slope_up = situ_value_and_slopes(g, u, BETA, LINEAR_BETA)
    tl.store(d_gate + at, (d * slope_gate).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (d * slope_up).to(d_up.dtype.element_ty), mask=inside)


def _grid(numel: int) -> tuple[int]:
    return (triton.cdiv(numel, BLOCK),)


def forward(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """As :func:`reference.forward`, for bf16 and fp32; strided inputs are copied first."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        _situ_glu_fwd_kernel[_grid(out.numel())](
            gate,
            up,
            out,
            out.numel(),
            BETA=beta,
            LINEAR_BETA=linear_beta,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return out


def backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference.backward`, for bf16 and fp32; strided inputs are copied first."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    if d_gate.numel():
        _situ_glu_bwd_kernel[_grid(d_gate.numel())](
            grad,
            gate,
            up,
            d_gate,
            d_up,
            d_gate.numel(),
            BETA=beta,
            LINEAR_BETA=linear_beta,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return d_gate, d_up
