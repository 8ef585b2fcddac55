"""MXFP4 weights: two E2M1 values a byte (low nibble first), one E8M0 scale for 32 of them."""

from k3tune_kernels.mxfp4.reference import GROUP_SIZE, decode, encode

__all__ = ["GROUP_SIZE", "decode", "encode"]
