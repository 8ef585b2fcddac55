"""Rows on their way between tokens and experts: spread out, exchanged, summed up again.

Sums run in fp32 (fp64 for fp64) over a table of places, in its order: no atomic additions, the same
result every time.

Shape letters: ``N`` tokens, ``A`` active experts a token, ``M`` routed rows, ``L`` latent width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3tune.parallel.groups import ExpertGroup
from k3tune.parallel.traffic import Traffic
from k3tune_kernels import mxfp8


class Link:
    """Exchanges rows within a group, and counts them."""

    def __init__(self, group: ExpertGroup, traffic: Traffic) -> None:
        self.group, self.traffic = group, traffic

    def exchange(
        self, rows: Tensor, sends: Sequence[int], receives: Sequence[int], kind: str
    ) -> Tensor:
        """Hand every rank its rows, which lie in the order of ranks.

        Args:
            rows: ``[sum(sends), ...]``, of any dtype gloo and NCCL know.
            sends, receives: rows for and from each rank.
            kind: of :data:`~k3tune.parallel.traffic.KINDS`.

        Returns:
            ``[sum(receives), ...]``, in the order of ranks.
        """
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        self.traffic.add(kind, [count * row_bytes for count in sends], self.group.rank)
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(
            received, rows.contiguous(), list(receives), list(sends), group=self.group.handle
        )
        return received


class Exchange(torch.autograd.Function):
    """Rows to the ranks they belong to; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ML: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        link: Link,
        kind: str,
        as_mxfp8: bool,
    ) -> Tensor:
        """``as_mxfp8``: rows travel rounded to MXFP8; gradients travel as they are."""
        ctx.sends, ctx.receives, ctx.link = sends, receives, link
        if not as_mxfp8:
            return link.exchange(rows_ML, sends, receives, kind)
        values_ML, scale_MG = mxfp8.encode(rows_ML)
        # neither gloo nor NCCL knows 8-bit floats
        packed = torch.cat([values_ML.view(torch.uint8), scale_MG], 1)
        values, scale = link.exchange(packed, sends, receives, kind).split(
            [values_ML.shape[1], scale_MG.shape[1]], 1
        )
        values = values.contiguous().view(torch.float8_e4m3fn)
        return mxfp8.decode(values, scale, rows_ML.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ML: Tensor) -> tuple[Tensor | None, ...]:
        """The same exchange the other way."""
        back = ctx.link.exchange(grad_ML, ctx.receives, ctx.sends, "gradient")
        return back, None, None, None, None, None


class Spread(torch.autograd.Function):
    """``x[index_M]``, and back: each row's gradient is the sum over its places.

    Args of ``apply``: ``x_NL``; ``index_M`` int64; ``places_NA`` int64, the places of each row of
    ``x`` in ``index_M``, in the order they are summed, -1 past the last.
    """

    @staticmethod
    def forward(ctx: Any, x_NL: Tensor, index_M: Tensor, places_NA: Tensor) -> Tensor:
        """Copy rows."""
        ctx.save_for_backward(places_NA)
        return x_NL.index_select(0, index_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ML: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of the copies."""
        (places_NA,) = ctx.saved_tensors
        total = grad_ML.new_zeros(
            (len(places_NA), grad_ML.shape[1]), dtype=_accumulator(grad_ML.dtype)
        )
        for places_N in places_NA.T if len(grad_ML) else ():
            term_NL = grad_ML[places_N.clamp(min=0)].to(total.dtype)
            total += torch.where(places_N[:, None] >= 0, term_NL, 0)
        return total.to(grad_ML.dtype), None, None


class Combine(torch.autograd.Function):
    """``out[n] = sum_a weights[n, a] * rows[places[n, a]]``, terms added in the order of ``a``.

    Args of ``apply``: ``rows_ML``; ``weights_NA`` floating; ``places_NA`` int64, every row once.
    """

    @staticmethod
    def forward(ctx: Any, rows_ML: Tensor, weights_NA: Tensor, places_NA: Tensor) -> Tensor:
        """Weighted sum, in the dtype of the rows."""
        ctx.save_for_backward(rows_ML, weights_NA, places_NA)
        dtype = _accumulator(rows_ML.dtype)
        out_NL = rows_ML.new_zeros((len(places_NA), rows_ML.shape[1]), dtype=dtype)
        for weights_N, places_N in zip(weights_NA.to(dtype).T, places_NA.T, strict=True):
            out_NL += weights_N[:, None] * rows_ML[places_N].to(dtype)
        return out_NL.to(rows_ML.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows and weights."""
        rows_ML, weights_NA, places_NA = ctx.saved_tensors
        dtype = _accumulator(rows_ML.dtype)
        wide_NL = grad_NL.to(dtype)
        drows_ML, dweights_NA = torch.empty_like(rows_ML), torch.empty_like(weights_NA)
        for a, places_N in enumerate(places_NA.T):
            drows_ML[places_N] = (weights_NA[:, a, None].to(dtype) * wide_NL).to(rows_ML.dtype)
            dweights_NA[:, a] = (rows_ML[places_N].to(dtype) * wide_NL).sum(1)
        return drows_ML, dweights_NA, None


def places_of(index_M: Tensor, num_rows: int, width: int) -> Tensor:
    """Where each row stands in ``index_M``: int64 ``[num_rows, width]``, ascending, then -1."""
    order_M = index_M.argsort(stable=True)
    sorted_M = index_M[order_M]
    starts = torch.searchsorted(sorted_M, torch.arange(num_rows, device=index_M.device))
    places = torch.full((num_rows, width), -1, dtype=torch.int64, device=index_M.device)
    nth_M = torch.arange(len(index_M), device=index_M.device) - starts[sorted_M]
    places[sorted_M, nth_M] = order_M
    return places


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
