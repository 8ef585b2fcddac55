"""A depthwise causal convolution of a few taps with SiLU, over each document of a row."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.short_convolution import reference

__all__ = ["short_convolution"]

# what the native kernels are compiled for: K3's convolutions
CPU_TAPS = 4


def short_convolution(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """``SiLU(sum_j w[c, j] x[t - P + j, c])`` over the inputs of a token's own document.

    Args:
        x_BTC: inputs, bf16, fp32 or fp64.
        past_BPC: the P inputs before them (zeros at a sequence's start).
        weight_C1S: ``[C, 1, P + 1]``, the newest input's tap last.
        reach_BTP: whether the token ``P - j`` back belongs to the same document, bool; None when
            every row is one document.
        backend: ``auto``, ``cpu`` or ``reference``.

    Returns:
        ``[B, T, C]`` in the dtype of ``x_BTC``; fp32 inside (fp64 for fp64 inputs).
        Differentiable in inputs, past and weight.

    Raises:
        ValueError: if the backend cannot run here.
    """
    cpu_limit = None
    if weight_C1S.shape[-1] != CPU_TAPS:
        cpu_limit = f"its CPU kernel takes {CPU_TAPS} taps, found {weight_C1S.shape[-1]}"
    elif past_BPC.dtype != x_BTC.dtype or weight_C1S.dtype is not torch.float32:
        cpu_limit = (
            f"its CPU kernel takes a past of the inputs' dtype and fp32 taps, found "
            f"{past_BPC.dtype} and {weight_C1S.dtype}"
        )
    chosen = dispatch.choose(
        "short_convolution", backend, x_BTC, past_BPC, weight_C1S, cpu_limit=cpu_limit
    )
    if chosen == "cpu":
        from k3tune_kernels.short_convolution.cpu_op import ShortConvolutionCpu

        return ShortConvolutionCpu.apply(x_BTC, past_BPC, weight_C1S, reach_BTP)
    return reference.short_convolution(x_BTC, past_BPC, weight_C1S, reach_BTP)
