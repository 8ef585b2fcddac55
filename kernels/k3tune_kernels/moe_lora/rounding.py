"""Rounding of the activations that enter a projection, as engines with narrow activations do it."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.mxfp8 import round_mxfp8

ROUNDINGS = ("none", "bf16", "mxfp8")
"""Names, in the order of their numbers in the native library."""


def round_straight_through(x: torch.Tensor, rounding: str) -> torch.Tensor:
    """``x`` rounded, in its own dtype; the gradient passes as if it were not.

    Args:
        x: ``[..., C]`` floating; for ``"mxfp8"`` C is a multiple of 32.
        rounding: a name of :data:`ROUNDINGS`.
    """
    return x if rounding == "none" else _StraightThrough.apply(x, rounding)


def check_rounding(rounding: str) -> None:
    """Refuse a name that is not one of :data:`ROUNDINGS`.

    Raises:
        ValueError: for another one.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"moe_lora: expected activation_rounding to be one of {ROUNDINGS}, found {rounding!r}"
        )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: str) -> torch.Tensor:
        return round_mxfp8(x) if rounding == "mxfp8" else x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
