"""The attention-residual mixer: a softmax-weighted sum over the banked block sums."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels import dispatch
from k3tune_kernels.attention_residual import reference

__all__ = ["attention_residual"]

# what the Triton kernels are compiled for: K3 mixes up to 9
MAX_TRITON_SOURCES = 9


def _implementation(backend: str) -> ModuleType:
    if backend == "reference":
        return reference
    if backend == "cpu":
        from k3tune_kernels.attention_residual import cpu_kernels

        return cpu_kernels
    from k3tune_kernels.attention_residual import triton_kernels

    return triton_kernels


class _AttentionResidual(torch.autograd.Function):
    """Saves the sources themselves (no copies) and two numbers a token and source."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        backend: str,
        norm_weight_D: torch.Tensor,
        query_weight_D: torch.Tensor,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        mix, weights_S, inverse_rms_S = _implementation(backend).forward(
            sources, norm_weight_D, query_weight_D, eps
        )
        ctx.save_for_backward(norm_weight_D, query_weight_D, weights_S, inverse_rms_S, *sources)
        ctx.backend = backend
        return mix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm_weight_D, query_weight_D, weights_S, inverse_rms_S, *sources = ctx.saved_tensors
        needs_norm, needs_query = ctx.needs_input_grad[2:4]
        d_sources, d_q_D = _implementation(ctx.backend).backward(
            grad,
            sources,
            norm_weight_D,
            query_weight_D,
            weights_S,
            inverse_rms_S,
            sum_weights=needs_norm or needs_query,
        )
        d_norm_D = (d_q_D * query_weight_D).to(norm_weight_D.dtype) if needs_norm else None
        d_query_D = (d_q_D * norm_weight_D).to(query_weight_D.dtype) if needs_query else None
        d_sources = [
            d_source if needed else None
            for d_source, needed in zip(d_sources, ctx.needs_input_grad[4:], strict=True)
        ]
        return (None, None, d_norm_D, d_query_D, *d_sources)


def _check(
    sources: Sequence[torch.Tensor], norm_weight_D: torch.Tensor, query_weight_D: torch.Tensor
) -> None:
    if not sources:
        raise ValueError("attention_residual expects at least one source, got none")
    first = sources[0]
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                f"attention_residual expects sources of one shape and dtype, got "
                f"{tuple(first.shape)} {first.dtype} for source 0 and {tuple(source.shape)} "
                f"{source.dtype} for source {i}"
            )
    for name, weight in (("norm_weight", norm_weight_D), ("query_weight", query_weight_D)):
        if weight.shape != first.shape[-1:]:
            raise ValueError(
                f"attention_residual expects {name} of shape {tuple(first.shape[-1:])}, the "
                f"width of the sources, got {tuple(weight.shape)}"
            )


def attention_residual(
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    *,
    eps: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Mix the sources with weights from a softmax over their normalized scores.

    ``score_i = sum_c(norm_c query_c s_ic) rsqrt(mean_c(s_ic^2) + eps)``, ``a = softmax(score)``,
    result ``sum_i a_i s_i``: the values are not normalized.

    Args:
        sources: tensors ``[..., D]`` of one shape, dtype and device; never stacked or copied, and
            kept by reference for the backward pass. Triton takes up to 9.
        norm_weight_D, query_weight_D: ``[D]``, any floating dtype.
        eps: added to the mean square.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[..., D]`` in the sources' dtype; fp32 inside (fp64 for fp64 sources). Differentiable
        in every source and in both weights.

    Raises:
        ValueError: if there are no sources, shapes or dtypes disagree, or the
            backend cannot run here.
    """
    _check(sources, norm_weight_D, query_weight_D)
    limit = None
    if len(sources) > MAX_TRITON_SOURCES:
        limit = f"its Triton kernel takes {MAX_TRITON_SOURCES} sources, found {len(sources)}"
    chosen = dispatch.choose(
        "attention_residual", backend, *sources, norm_weight_D, query_weight_D, limit=limit
    )
    if not torch.is_grad_enabled():
        mix, _, _ = _implementation(chosen).forward(sources, norm_weight_D, query_weight_D, eps)
        return mix
    return _AttentionResidual.apply(eps, chosen, norm_weight_D, query_weight_D, *sources)
