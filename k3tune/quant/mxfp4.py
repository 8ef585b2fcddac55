"""MXFP4 weights with names in their errors: the typed face over ``k3tune_kernels.mxfp4``.

A weight ``[..., O, I]`` is stored as ``packed`` u8 ``[..., O, I/2]`` (two E2M1 codes a byte, the
even column in the low nibble) and ``scale`` u8 ``[..., O, G]`` (one E8M0 exponent for 32 columns,
``G = I/32``): ``w[o, i] = e2m1(code) * 2^(scale[o, i // 32] - 127)``.

Legend: O output features, I input features, G groups of 32 along I.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3tune.errors import QuantizationError
from k3tune_kernels import mxfp4
from k3tune_kernels.mxfp4 import GROUP_SIZE

SCALE_RULES = ("ceil", "floor")
_NAN_SCALE = 255
_DECODED_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_ENCODED_DTYPES = (*_DECODED_DTYPES, torch.float16)


@dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """A packed weight whose two tensors are known to belong together.

    Attributes:
        packed: u8 ``[..., O, I/2]``.
        scale: u8 ``[..., O, I/32]``.

    Raises:
        QuantizationError: if dtypes or shapes disagree.
    """

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        _check_pair(self.packed, self.scale, "weight")

    @property
    def shape(self) -> torch.Size:
        """Logical shape ``[..., O, I]``."""
        return torch.Size((*self.packed.shape[:-1], self.in_features))

    @property
    def out_features(self) -> int:
        """``O``."""
        return self.packed.shape[-2]

    @property
    def in_features(self) -> int:
        """``I``."""
        return 2 * self.packed.shape[-1]

    @property
    def num_groups(self) -> int:
        """``G``, the scales of a row."""
        return self.scale.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Stored bytes of both tensors: 4.25 bits a weight."""
        return self.packed.numel() + self.scale.numel()


def pack(codes: Tensor) -> Tensor:
    """Put two E2M1 codes into a byte, the even column in the low nibble.

    Args:
        codes: u8 ``[..., I]``, values 0..15, ``I`` even.

    Returns:
        u8 ``[..., I/2]``.

    Raises:
        QuantizationError: for another dtype, an odd width, or a code above 15.
    """
    _check_bytes(codes, "codes")
    if codes.shape[-1] % 2:
        raise QuantizationError(
            f"codes has {codes.shape[-1]} columns, expected an even number: a byte holds two"
        )
    above = codes > 15
    if above.any():
        raise QuantizationError(
            f"codes holds {int(codes.max())}, expected E2M1 codes 0..15: "
            f"{int(above.sum())} of {codes.numel()} are above"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Take the E2M1 codes out of their bytes; the inverse of :func:`pack`.

    Args:
        packed: u8 ``[..., I/2]``.

    Returns:
        u8 ``[..., I]``, values 0..15.

    Raises:
        QuantizationError: for another dtype.
    """
    _check_bytes(packed, "packed")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize(
    packed: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "weight",
) -> Tensor:
    """Decode a weight exactly.

    Every value is two significant bits times a power of two, from 2^-128 to 6 * 2^127. fp64 holds
    all of them. fp32 and bf16 hold all below 2^128, which scale bytes up to 252 never reach; at
    253 and 254 larger values become inf, as in any IEEE conversion.

    Args:
        packed: u8 ``[..., O, I/2]``.
        scale: u8 ``[..., O, I/32]``, bytes 0..254.
        dtype: of the result: bf16, fp32 or fp64.
        name: of the weight, for the errors.

    Returns:
        ``[..., O, I]`` in ``dtype``.

    Raises:
        QuantizationError: for tensors that do not belong together, or a scale byte of 255 (E8M0's
            NaN), naming the weight and the first place.
    """
    _check_pair(packed, scale, name)
    if dtype not in _DECODED_DTYPES:
        raise QuantizationError(
            f"{name} cannot be decoded to {dtype}, expected one of {_DECODED_DTYPES}"
        )
    _check_scale_values(scale, name)
    return mxfp4.decode(packed, scale, dtype)


def quantize(
    weight: Tensor,
    *,
    scale_rule: Literal["ceil", "floor"],
    name: str = "weight",
) -> MXFP4Tensor:
    """Encode a weight: round to nearest even on the E2M1 grid, saturating at 6.

    With ``amax`` the largest magnitude of a group, ``"ceil"`` takes the exponent
    ``ceil(log2(amax / 6))`` (nothing saturates) and ``"floor"`` takes ``floor(log2(amax)) - 2``
    (values above 6 * 2^exponent saturate, small ones keep one more bit). Exponents are clamped to
    -127..127, and a group of zeros takes -127. K3's own rule is not published, so a decoded base
    encoded again may differ: the base is never re-encoded.

    Args:
        weight: floating ``[..., O, I]``, ``I`` a multiple of 32, finite.
        scale_rule: ``"ceil"`` or ``"floor"``.
        name: of the weight, for the errors.

    Raises:
        QuantizationError: for a dtype, width or value that cannot be encoded, or another rule.
    """
    if scale_rule not in SCALE_RULES:
        raise QuantizationError(
            f"scale_rule is {scale_rule!r} for {name}, expected one of {', '.join(SCALE_RULES)}"
        )
    if weight.dtype not in _ENCODED_DTYPES:
        raise QuantizationError(f"{name} is {weight.dtype}, expected one of {_ENCODED_DTYPES}")
    if weight.dim() < 2 or weight.shape[-1] % GROUP_SIZE:
        raise QuantizationError(
            f"{name} has shape {list(weight.shape)}, expected [..., O, I] with I a multiple of "
            f"{GROUP_SIZE}: one scale covers {GROUP_SIZE} columns"
        )
    bad = ~torch.isfinite(weight)
    if bad.any():
        raise QuantizationError(
            f"{name} holds {int(bad.sum())} values that are not finite, the first "
            f"{weight[bad][0].item()} at {_first_place(bad)}: MXFP4 has no inf or nan"
        )
    return MXFP4Tensor(*mxfp4.encode(weight, scale_rule=scale_rule))


def _check_bytes(tensor: Tensor, name: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() < 1:
        raise QuantizationError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, expected uint8 [..., columns]"
        )


def _check_pair(packed: Tensor, scale: Tensor, name: str) -> None:
    for part, tensor in (("packed", packed), ("scale", scale)):
        if tensor.dtype != torch.uint8:
            raise QuantizationError(
                f"{name}: {part} is {tensor.dtype}, expected uint8: pass the bytes as published"
            )
    if packed.dim() < 2 or packed.shape[-1] % (GROUP_SIZE // 2):
        raise QuantizationError(
            f"{name}: packed has shape {list(packed.shape)}, expected [..., O, I/2] with I a "
            f"multiple of {GROUP_SIZE}"
        )
    expected = [*packed.shape[:-1], 2 * packed.shape[-1] // GROUP_SIZE]
    if list(scale.shape) != expected:
        raise QuantizationError(
            f"{name}: scale has shape {list(scale.shape)}, expected {expected} beside packed "
            f"{list(packed.shape)}: one byte for {GROUP_SIZE} columns"
        )
    if packed.device != scale.device:
        raise QuantizationError(
            f"{name}: packed is on {packed.device} and scale on {scale.device}, expected one device"
        )


def _check_scale_values(scale: Tensor, name: str) -> None:
    bad = scale == _NAN_SCALE
    if bad.any():
        raise QuantizationError(
            f"{name}: scale byte {_NAN_SCALE} (not a number) at {_first_place(bad, 'group')}, "
            f"{int(bad.sum())} in all, expected 0..254: the file is damaged or no MXFP4 weight"
        )


def _first_place(bad: Tensor, last: str = "column") -> str:
    """Say where the first true value of ``[..., O, X]`` is."""
    *stack, row, column = (int(index) for index in bad.nonzero()[0])
    place = f"row {row}, {last} {column}"
    return f"{list(stack)}, {place}" if stack else place
