"""The 4-bit format of the frozen experts."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.quant.mxfp4 import MXFP4Tensor, dequantize, pack, quantize, unpack

__all__ = ["MXFP4Tensor", "dequantize", "pack", "quantize", "unpack"]
__getattr__, __dir__ = lazy_attributes(
    __name__, names=dict.fromkeys(__all__, "k3tune.quant.mxfp4"), subpackages=("mxfp4",)
)
