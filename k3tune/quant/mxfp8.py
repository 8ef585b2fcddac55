"""Activations in MXFP8, as rollout engines with 8-bit activations round them.

E4M3 values, one E8M0 scale (a power of two) for 32 neighbours, by the OCP MX specification: see
:mod:`k3tune_kernels.mxfp8.reference` for the rules.
"""

from torch import Tensor

from k3tune.errors import QuantizationError
from k3tune_kernels import mxfp8
from k3tune_kernels.moe_lora.rounding import round_straight_through


def round_mxfp8(x: Tensor) -> Tensor:
    """``x`` as MXFP8 holds it, in its own dtype.

    A group with a NaN or an infinity becomes NaN as a whole.

    Args:
        x: ``[..., C]`` floating, ``C`` a multiple of 32.

    Raises:
        QuantizationError: for another dtype or width.
    """
    try:
        return mxfp8.round_mxfp8(x)
    except ValueError as error:
        raise QuantizationError(str(error)) from error


def round_mxfp8_straight_through(x: Tensor) -> Tensor:
    """:func:`round_mxfp8` whose gradient passes as if nothing were rounded.

    Raises:
        QuantizationError: for another dtype or width.
    """
    try:
        return round_straight_through(x, "mxfp8")
    except ValueError as error:
        raise QuantizationError(str(error)) from error
