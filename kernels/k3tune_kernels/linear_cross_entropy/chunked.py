"""The head's matmul and the loss, a chunk of tokens at a time, forward and backward.

Letters: N tokens, C tokens of a chunk, D hidden width, V vocabulary.

The gradient of row n's loss with respect to ``hidden_n`` is a row of D numbers, and the logits
it comes from are there in the forward pass: it is taken then and kept (``[N, D]``), and the
backward pass only multiplies row n by the incoming gradient. The weight's gradient mixes all
rows, so it needs the incoming gradient first: the backward pass makes the logits again.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.linear_cross_entropy import reference


def _implementation(backend: str) -> ModuleType:
    if backend == "reference":
        return reference
    from k3tune_kernels.linear_cross_entropy import triton_kernels

    return triton_kernels


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def losses(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    ignore_index: int,
    chunk_tokens: int,
    backend: str,
    keep_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per-token loss ``[N]`` and, if asked, its gradient ``[N, D]`` in the weight's dtype."""
    cross_entropy_ = _implementation(backend).cross_entropy_
    compute = torch.promote_types(weight_VD.dtype, torch.float32)
    nll_N = torch.empty(len(hidden_ND), dtype=compute, device=hidden_ND.device)
    d_hidden_ND = None
    if keep_gradient:
        d_hidden_ND = torch.empty(hidden_ND.shape, dtype=weight_VD.dtype, device=hidden_ND.device)
    for rows in _chunks(len(hidden_ND), chunk_tokens):
        logits_CV = hidden_ND[rows].to(weight_VD.dtype) @ weight_VD.T
        nll_N[rows] = cross_entropy_(
            logits_CV, targets_N[rows], ignore_index, with_gradient=keep_gradient
        )
        if d_hidden_ND is not None:
            torch.mm(logits_CV, weight_VD, out=d_hidden_ND[rows])
        # the next chunk's logits must not be made while these are alive
        del logits_CV
    return nll_N, d_hidden_ND


def weight_gradient(
    grad_N: torch.Tensor,
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    ignore_index: int,
    chunk_tokens: int,
    backend: str,
) -> torch.Tensor:
    """``sum_n grad_n dnll_n/dweight``, ``[V, D]``, accumulated in fp32 over the chunks."""
    cross_entropy_ = _implementation(backend).cross_entropy_
    compute = torch.promote_types(weight_VD.dtype, torch.float32)
    d_weight_VD = torch.zeros(weight_VD.shape, dtype=compute, device=weight_VD.device)
    # padding rows may hold anything: zero times NaN must not reach the sum
    ignored_N1 = (targets_N == ignore_index)[:, None]
    for rows in _chunks(len(hidden_ND), chunk_tokens):
        logits_CV = hidden_ND[rows].to(weight_VD.dtype) @ weight_VD.T
        cross_entropy_(logits_CV, targets_N[rows], ignore_index, with_gradient=True)
        scaled_CD = hidden_ND[rows].to(compute) * grad_N[rows, None].to(compute)
        scaled_CD = scaled_CD.masked_fill_(ignored_N1[rows], 0).to(weight_VD.dtype)
        d_weight_VD += logits_CV.T @ scaled_CD
        del logits_CV
    return d_weight_VD.to(weight_VD.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Joins :func:`losses` and :func:`weight_gradient` to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        ignore_index: int,
        chunk_tokens: int,
        backend: str,
        track_gradient: bool,
    ) -> torch.Tensor:
        ctx.settings = {
            "ignore_index": ignore_index,
            "chunk_tokens": chunk_tokens,
            "backend": backend,
        }
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            nll_N, d_hidden_ND = losses(
                hidden_ND,
                weight_VD,
                targets_N,
                keep_gradient=track_gradient and needs_hidden,
                **ctx.settings,
            )
        kept = (hidden_ND, weight_VD, targets_N) if needs_weight else (None, None, None)
        ctx.save_for_backward(d_hidden_ND, *kept)
        ctx.hidden_dtype = hidden_ND.dtype
        return nll_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden_ND, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = d_weight = None
        with torch.autocast(grad_N.device.type, enabled=False):
            if needs_hidden:
                d_hidden = (grad_N[:, None] * d_hidden_ND).to(ctx.hidden_dtype)
            if needs_weight:
                d_weight = weight_gradient(grad_N, *kept, **ctx.settings)
        return d_hidden, d_weight, None, None, None, None, None
