"""MXFP4 decode and encode in plain torch, exact to the bit.

Shapes: O outputs, I inputs (the axis that is packed and grouped), G = I / 32 groups.
"""

from functools import cache

import torch

GROUP_SIZE = 32
"""Weights that share one scale."""

# Magnitudes of the codes 0..7; bit 3 of a code is the sign.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_LARGEST_SCALE_BYTE = 254

# A byte decodes to two values, moved as one element of twice the width.
_PAIR_DTYPES = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}

DECODED_DTYPES = tuple(_PAIR_DTYPES)
"""What :func:`decode` gives: bf16, fp32, fp64."""


def decode(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Weights of MXFP4 bytes, without rounding.

    Args:
        packed: ``[..., O, I/2]`` uint8; the low nibble is the even input.
        scale: ``[..., O, I/32]`` uint8; byte b scales by ``2**(b - 127)``, 255 is NaN.
        dtype: bf16, fp32 or fp64.

    Returns:
        ``[..., O, I]`` of ``dtype``; infinite beyond its range and NaN under a scale of 255, which
        callers who read files refuse.

    Raises:
        ValueError: if shapes or dtypes are not these.
    """
    if dtype not in _PAIR_DTYPES:
        raise ValueError(f"expected dtype to be bf16, fp32 or fp64, found {dtype}")
    check_packed("weight", packed, scale)
    pairs, scales = _tables(dtype, packed.device)
    values = pairs.index_select(0, packed.reshape(-1).int())
    values = values.view(dtype).view(*scale.shape, GROUP_SIZE)
    values *= scales.index_select(0, scale.reshape(-1).int()).view(*scale.shape, 1)
    return values.flatten(-2)


def encode(weight: torch.Tensor, *, scale_rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights to MXFP4: nearest, ties to the even code, saturating at 6.

    Args:
        weight: ``[..., O, I]`` floating, finite; I a multiple of 32.
        scale_rule: exponent of a group's scale from its largest magnitude ``amax``: ``"ceil"``
            takes ``ceil(log2(amax / 6))`` (nothing saturates), ``"floor"`` takes
            ``floor(log2(amax)) - 2`` (the OCP rule); an exponent below byte 0 becomes byte 0.

    Returns:
        ``packed [..., O, I/2]`` and ``scale [..., O, I/32]``, both uint8.

    Raises:
        ValueError: for an unknown rule, a dtype or shape that is not this, or, with its place, a
            value that is not finite or needs a scale beyond byte 254 (only fp64 holds such).
    """
    if scale_rule not in ("ceil", "floor"):
        raise ValueError(f"expected scale_rule 'ceil' or 'floor', found {scale_rule!r}")
    if not weight.is_floating_point():
        raise ValueError(f"expected floating weights, found {weight.dtype}")
    if weight.dim() < 2:
        raise ValueError(f"expected weights [..., O, I], found shape {list(weight.shape)}")
    if weight.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"expected weights [..., O, I] with I a multiple of {GROUP_SIZE}, found "
            f"{weight.shape[-1]} columns: one scale covers {GROUP_SIZE}"
        )
    # fp64 represents every scaled value exactly, subnormal inputs and scales included.
    groups = weight.double().unflatten(-1, (-1, GROUP_SIZE))
    amax = groups.abs().amax(-1)
    # a group is finite if its largest magnitude is: amax carries nan on
    if not torch.isfinite(amax).all():
        raise ValueError(
            f"expected finite weights, found {_first_value(weight, ~torch.isfinite(weight))}: "
            "MXFP4 has no inf or nan"
        )
    mantissa, exponent = torch.frexp(amax)
    # amax = mantissa * 2**exponent, mantissa in [0.5, 1), and 6 = 0.75 * 2**3
    exponent = exponent - 3
    if scale_rule == "ceil":
        exponent = exponent + (mantissa > 0.75)
    byte = (exponent + _SCALE_BIAS).clamp(min=0)
    if (byte > _LARGEST_SCALE_BYTE).any():
        # the value that decides each such group
        largest = (groups.abs() == amax[..., None]) & (byte > _LARGEST_SCALE_BYTE)[..., None]
        raise ValueError(
            "expected magnitudes that the largest scale, 2^127, can represent, found "
            f"{_first_value(weight, largest.flatten(-2))}: scale the weights down"
        )
    byte = torch.where(amax == 0, 0, byte)
    scaled = torch.ldexp(groups, (_SCALE_BIAS - byte)[..., None])
    code = _nearest_code(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    code = code.flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, byte.to(torch.uint8)


def check_packed(name: str, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``packed`` and ``scale`` describe one MXFP4 weight."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(
            f"{name}: expected uint8 packed and scale, found {packed.dtype} and {scale.dtype}: "
            "pass the bytes as published"
        )
    if packed.device != scale.device:
        raise ValueError(
            f"{name}: expected packed and scale on one device, found {packed.device} and "
            f"{scale.device}"
        )
    if packed.dim() < 2 or packed.shape[-1] % (GROUP_SIZE // 2):
        raise ValueError(
            f"{name}: expected packed [..., O, I/2] with I a multiple of 32, "
            f"found {tuple(packed.shape)}"
        )
    expected = (*packed.shape[:-1], packed.shape[-1] // (GROUP_SIZE // 2))
    if scale.shape != expected:
        raise ValueError(
            f"{name}: packed {tuple(packed.shape)} needs scale {expected}, "
            f"found {tuple(scale.shape)}: one byte for {GROUP_SIZE} columns"
        )


def first_place(bad: torch.Tensor, last: str = "column") -> str:
    """Say where the first true value of ``[..., O, X]`` is."""
    *stack, row, column = (int(index) for index in bad.nonzero()[0])
    place = f"row {row}, {last} {column}"
    return f"{stack}, {place}" if stack else place


def _first_value(weight: torch.Tensor, bad: torch.Tensor) -> str:
    return f"{int(bad.sum())} others, the first {weight[bad][0].item()} at {first_place(bad)}"


@cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 256 value pairs, each viewed as one wide element, and the 256 scales."""
    values = [*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES)]
    pairs = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    scales = [2.0 ** (byte - _SCALE_BIAS) for byte in range(255)] + [float("nan")]
    pair_table = torch.tensor(pairs, dtype=dtype, device=device)
    return (
        pair_table.view(_PAIR_DTYPES[dtype]).squeeze(-1),
        torch.tensor(scales, dtype=torch.float64).to(device=device, dtype=dtype),
    )


def _nearest_code(magnitude: torch.Tensor) -> torch.Tensor:
    """E2M1 code 0..7 nearest to ``magnitude``; a midpoint goes to the even code."""
    code = (magnitude > 0.25).to(torch.uint8)
    for midpoint, is_even_above in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += magnitude >= midpoint if is_even_above else magnitude > midpoint
    return code
