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
        ValueError: if shapes do not fit, or the backend cannot run here.
    """
    _check(x_BTC, past_BPC, weight_C1S, reach_BTP)
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


def _check(
    x_BTC: torch.Tensor,
    past_BPC: torch.Tensor,
    weight_C1S: torch.Tensor,
    reach_BTP: torch.Tensor | None,
) -> None:
    if x_BTC.ndim != 3 or weight_C1S.ndim != 3:
        raise ValueError(
            f"short_convolution expects inputs [B, T, C] and a weight [C, 1, P + 1], got "
            f"{tuple(x_BTC.shape)} and {tuple(weight_C1S.shape)}"
        )
    batch, length, channels = x_BTC.shape
    past = weight_C1S.shape[-1] - 1
    found = [tuple(past_BPC.shape), tuple(weight_C1S.shape)]
    expected: list[tuple[int, ...]] = [(batch, past, channels), (channels, 1, past + 1)]
    if reach_BTP is not None:
        found.append(tuple(reach_BTP.shape))
        expected.append((batch, length, past))
    if found != expected or (reach_BTP is not None and reach_BTP.dtype is not torch.bool):
        raise ValueError(
            f"short_convolution expects past, weight and reach (bool) of shapes {expected}, got "
            f"{found}{'' if reach_BTP is None else f' ({reach_BTP.dtype})'}"
        )
