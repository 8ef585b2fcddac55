"""MXFP8 values: E4M3, one E8M0 scale for 32 of them."""

from k3tune_kernels.mxfp8.reference import GROUP_SIZE, decode, encode, round_mxfp8

__all__ = ["GROUP_SIZE", "decode", "encode", "round_mxfp8"]
