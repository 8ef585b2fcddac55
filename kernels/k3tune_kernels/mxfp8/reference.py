"""MXFP8 in plain torch, by the rules of the OCP MX specification (version 1.0).

A group of 32 values shares the scale ``2^(floor(log2(amax)) - 8)``, 8 being the exponent of E4M3's
largest value 448, at least 2^-127. Values over the scale are rounded to E4M3: nearest, ties to
even, saturating at 448 (amax over the scale may reach 511). The specification leaves open what a
group with a NaN or an infinity becomes: here every value of it is NaN, so that none is lost.

Shapes: C columns, a multiple of 32; G = C / 32 groups.
"""

import torch

GROUP_SIZE = 32
"""Values that share one scale."""

_LARGEST = 448.0
_LARGEST_EXPONENT = 8
_SCALE_BIAS = 127
_SCALE_NAN = 255


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to MXFP8.

    Args:
        x: ``[..., C]`` bf16, fp16, fp32 or fp64 (rounded to fp32 first).

    Returns:
        ``[..., C]`` float8_e4m3fn, and ``[..., G]`` uint8: byte b scales by ``2^(b - 127)``, 255 is
        NaN.

    Raises:
        ValueError: if C is no multiple of 32 or ``x`` is not floating.
    """
    groups = _groups(x)
    amax = groups.abs().amax(-1, keepdim=True)
    # of a subnormal amax the exponent is too small to matter: the scale ends at 2^-127
    exponent = torch.frexp(amax).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(amax > 0, exponent, -_SCALE_BIAS).clamp(min=-_SCALE_BIAS)
    values = torch.ldexp(groups, -exponent).clamp(-_LARGEST, _LARGEST)
    finite = amax.isfinite()
    values = torch.where(finite, values, torch.nan).to(torch.float8_e4m3fn)
    scale = torch.where(finite, exponent + _SCALE_BIAS, _SCALE_NAN).to(torch.uint8)
    return values.view(x.shape), scale.squeeze(-1)


def decode(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of :func:`encode`, exact in bf16, fp32 and fp64.

    Args:
        values: ``[..., C]`` float8_e4m3fn.
        scale: ``[..., G]`` uint8.
        dtype: of the result.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if scale.shape != (*values.shape[:-1], values.shape[-1] // GROUP_SIZE):
        raise ValueError(
            f"expected a scale for {GROUP_SIZE} values, found {tuple(values.shape)} values and "
            f"{tuple(scale.shape)} scales"
        )
    wide = values.float().unflatten(-1, (-1, GROUP_SIZE))
    scaled = torch.ldexp(wide, scale[..., None].int() - _SCALE_BIAS)
    scaled = torch.where(scale[..., None] == _SCALE_NAN, torch.nan, scaled)
    return scaled.flatten(-2).to(dtype)


def round_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """``x`` as MXFP8 has it: ``decode(*encode(x))`` in the dtype of ``x``.

    Args:
        x: ``[..., C]``, as :func:`encode` takes it; fp16 cannot hold every result.

    Raises:
        ValueError: as :func:`encode`.
    """
    return decode(*encode(x), x.dtype)


def _groups(x: torch.Tensor) -> torch.Tensor:
    """``[..., G, 32]`` fp32."""
    if not x.is_floating_point() or x.ndim < 1 or x.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"expected floating values with a multiple of {GROUP_SIZE} columns, found {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    return x.float().unflatten(-1, (-1, GROUP_SIZE))
