"""MXFP4 weights with names in their errors: the typed face over ``k3tune_kernels.mxfp4``.

A weight ``[..., O, I]`` is stored as ``packed`` u8 ``[..., O, I/2]`` (two E2M1 codes a byte, the
even column in the low nibble) and ``scale`` u8 ``[..., O, G]`` (one E8M0 exponent for 32 columns,
``G = I/32``): ``w[o, i] = e2m1(code) * 2^(scale[o, i // 32] - 127)``.

Legend: O output features, I input features, G groups of 32 along I.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3tune.errors import QuantizationError
from k3tune_kernels import mxfp4
from k3tune_kernels.mxfp4.reference import check_packed, first_place

_NAN_SCALE = 255


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
        with _naming():
            check_packed("weight", self.packed, self.scale)

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
            f"codes has {codes.shape[-1]} columns, expected an even number: a byte holds two, "
            "append one"
        )
    above = codes > 15
    if above.any():
        raise QuantizationError(
            f"codes holds {int(codes.max())}, expected E2M1 codes 0..15: "
            f"{int(above.sum())} of {codes.numel()} are above, take their low four bits"
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
    packed: Tensor | MXFP4Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "weight",
) -> Tensor:
    """Decode a weight exactly.

    Every value is two significant bits times a power of two, from 2^-128 to 6 * 2^127. fp64 holds
    all of them. fp32 and bf16 hold all below 2^128, which scale bytes up to 252 never reach; at
    253 and 254 larger values become inf, as in any IEEE conversion.

    Args:
        packed: u8 ``[..., O, I/2]``, or an :class:`MXFP4Tensor`, what :func:`quantize` returns.
        scale: u8 ``[..., O, I/32]``, bytes 0..254; None with an :class:`MXFP4Tensor`, which has it.
        dtype: of the result: bf16, fp32 or fp64.
        name: of the weight, for the errors.

    Returns:
        ``[..., O, I]`` in ``dtype``.

    Raises:
        QuantizationError: for tensors that do not belong together, another dtype, or a scale byte
            of 255 (E8M0's NaN), naming the weight and the first place.
    """
    if isinstance(packed, MXFP4Tensor) != (scale is None):
        raise QuantizationError(
            f"{name}: expected packed and scale, or one MXFP4Tensor, found "
            f"{type(packed).__name__} and {type(scale).__name__}: pass either"
        )
    if isinstance(packed, MXFP4Tensor):
        weight = packed
        packed, scale = weight.packed, weight.scale
    assert scale is not None, f"{name=} has no scale"
    with _naming():
        check_packed(name, packed, scale)
    _check_scale_values(scale, name)
    with _naming(f"{name}: "):
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
    (values above 6 * 2^exponent saturate, small ones keep one more bit). An exponent below -127
    becomes -127, where values round to multiples of 2^-128; so does a group of zeros. One above
    127 is refused. K3's own rule is not published, so a decoded base encoded again may differ: the
    base is never re-encoded.

    Args:
        weight: floating ``[..., O, I]``, ``I`` a multiple of 32, finite.
        scale_rule: ``"ceil"`` or ``"floor"``.
        name: of the weight, for the errors.

    Returns:
        The packed weight; :func:`dequantize` takes it as it is.

    Raises:
        QuantizationError: for a dtype or width that cannot be encoded or another rule; for a value
            that is not finite or beyond the largest scale (only fp64 holds such), with its place.
    """
    with _naming(f"{name}: "):
        return MXFP4Tensor(*mxfp4.encode(weight, scale_rule=scale_rule))


@contextmanager
def _naming(prefix: str = "") -> Iterator[None]:
    """Turn what the kernels refuse into an error of this library, with the weight's name."""
    try:
        yield
    except ValueError as error:
        raise QuantizationError(f"{prefix}{error}") from error


def _check_bytes(tensor: Tensor, name: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() < 1:
        raise QuantizationError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, expected uint8 "
            "[..., columns]: pass bytes"
        )


def _check_scale_values(scale: Tensor, name: str) -> None:
    bad = scale == _NAN_SCALE
    if bad.any():
        raise QuantizationError(
            f"{name}: scale byte {_NAN_SCALE} (not a number) at {first_place(bad, 'group')}, "
            f"{int(bad.sum())} in all, expected 0..254: the file is damaged or no MXFP4 weight"
        )
