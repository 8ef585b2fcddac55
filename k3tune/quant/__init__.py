"""The 4-bit format of the frozen experts."""

from k3tune.quant.mxfp4 import MXFP4Tensor, dequantize, pack, quantize, unpack

__all__ = ["MXFP4Tensor", "dequantize", "pack", "quantize", "unpack"]
