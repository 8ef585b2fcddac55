"""The narrow side of LoRA: shrink to the rank, and Gram products for the factors' gradients.

Narrow tensors are fp32 ``[M, R]`` with alpha / rank in them: ``scaling * x A^T`` in the forward,
``scaling * dy B`` in the backward. Then ``dA = (scaling dy B)^T x``, ``dB = dy^T (scaling x A^T)``.

Shapes: M routed rows, K the contracted width of a shrink, W the wide side of a Gram product, R
rank.
"""

import triton
import triton.language as tl


@triton.jit
def _shrink(x_MK, factor, k_K, inside_K, rank_R, stride_k, stride_rank, RANK: tl.constexpr, acc_MR):
    factor_KR = tl.load(
        factor + k_K[:, None] * stride_k + rank_R[None, :] * stride_rank,
        mask=inside_K[:, None] & (rank_R < RANK)[None, :],
        other=0.0,
    )
    return tl.dot(x_MK, factor_KR.to(x_MK.dtype), acc_MR, input_precision="ieee")


@triton.jit
def _store_narrow(out, acc_MR, scaling, expert, rows_M, inside_M, rank_R, RANK: tl.constexpr):
    tl.store(
        out + rows_M.to(tl.int64)[:, None] * RANK + rank_R[None, :],
        acc_MR * tl.load(scaling + expert),
        mask=inside_M[:, None] & (rank_R < RANK)[None, :],
    )


@triton.jit
def _lora_shrink_kernel(
    x,
    token_of_row,
    first_factor,
    first_scaling,
    first_out,
    second_factor,
    second_scaling,
    second_out,
    expert_of_tile,
    row_of_tile,
    tile_offsets,
    row_offsets,
    num_experts,
    K,
    first_expert_stride,
    second_expert_stride,
    stride_k,
    first_rank_stride,
    second_rank_stride,
    GATHER: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``scaling * x @ factor`` for a ``[BLOCK_M, BLOCK_R]`` tile of fp32 ``[M, R]``.

    Grid (row tiles, rank tiles). x is ``[N, K]`` read by token (GATHER) or ``[M, K]``. With a
    second factor (SECOND_RANK > 0: gate and up) one read of x serves both; both have ``stride_k``.
    """
    tile = tl.program_id(0)
    if tile < tl.load(tile_offsets + num_experts):
        expert = tl.load(expert_of_tile + tile)
        rows_M = tl.load(row_of_tile + tile) + tl.arange(0, BLOCK_M)
        inside_M = rows_M < tl.load(row_offsets + expert + 1)
        if GATHER:
            source_M = tl.load(token_of_row + rows_M, mask=inside_M, other=0).to(tl.int64)
        else:
            source_M = rows_M.to(tl.int64)
        rank_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        first_factor += expert.to(tl.int64) * first_expert_stride
        if SECOND_RANK > 0:
            second_factor += expert.to(tl.int64) * second_expert_stride
        first_MR = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        second_MR = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for k in range(0, K, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            x_MK = tl.load(
                x + source_M[:, None] * K + k_K[None, :],
                mask=inside_M[:, None] & (k_K < K)[None, :],
                other=0.0,
            )
            first_MR = _shrink(
                x_MK, first_factor, k_K, k_K < K, rank_R, stride_k, first_rank_stride,
                FIRST_RANK, first_MR,
            )  # fmt: skip
            if SECOND_RANK > 0:
                second_MR = _shrink(
                    x_MK, second_factor, k_K, k_K < K, rank_R, stride_k, second_rank_stride,
                    SECOND_RANK, second_MR,
                )  # fmt: skip
        _store_narrow(
            first_out, first_MR, first_scaling, expert, rows_M, inside_M, rank_R, FIRST_RANK
        )
        if SECOND_RANK > 0:
            _store_narrow(
                second_out, second_MR, second_scaling, expert, rows_M, inside_M, rank_R, SECOND_RANK
            )


@triton.jit
def _lora_gram_kernel(
    narrow,
    wide,
    token_of_row,
    weight_of_row,
    out,
    group_offsets,
    W,
    out_group_stride,
    out_wide_stride,
    out_rank_stride,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``wide^T narrow`` over the rows of one group, for a ``[BLOCK_N, BLOCK_R]`` tile.

    Grid (wide tiles, rank tiles, groups). A group is an expert, or a stretch of rows whose partial
    products the caller sums. One program adds its rows in order, BLOCK_K at a time: no atomics, and
    a group without rows stores zeros. wide is ``[N, W]`` read by token (GATHER) or ``[M, W]``.
    """
    group = tl.program_id(2)
    begin = tl.load(group_offsets + group)
    end = tl.load(group_offsets + group + 1)
    wide_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc_NR = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for row in range(begin, end, BLOCK_K):
        rows_K = row + tl.arange(0, BLOCK_K)
        inside_K = rows_K < end
        narrow_KR = tl.load(
            narrow + rows_K.to(tl.int64)[:, None] * RANK + rank_R[None, :],
            mask=inside_K[:, None] & (rank_R < RANK)[None, :],
            other=0.0,
        )
        if WEIGHTED:
            weight_K = tl.load(weight_of_row + rows_K, mask=inside_K, other=0.0)
            narrow_KR = narrow_KR * weight_K[:, None]
        if GATHER:
            source_K = tl.load(token_of_row + rows_K, mask=inside_K, other=0).to(tl.int64)
        else:
            source_K = rows_K.to(tl.int64)
        wide_KN = tl.load(
            wide + source_K[:, None] * W + wide_N[None, :],
            mask=inside_K[:, None] & (wide_N < W)[None, :],
            other=0.0,
        )
        acc_NR = _dot_wide(acc_NR, tl.trans(wide_KN), narrow_KR)
    tl.store(
        out
        + group.to(tl.int64) * out_group_stride
        + wide_N[:, None] * out_wide_stride
        + rank_R[None, :] * out_rank_stride,
        acc_NR.to(out.dtype.element_ty),
        mask=(wide_N < W)[:, None] & (rank_R < RANK)[None, :],
    )


@triton.jit
def _dot_wide(acc, wide, narrow):
    """``acc + wide @ narrow``, the mirror of :func:`dot_narrow`."""
    if wide.dtype == tl.float32:
        acc = tl.dot(wide, narrow, acc, input_precision="ieee")
    else:
        high = narrow.to(tl.bfloat16)
        low = (narrow - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(wide, low, tl.dot(wide, high, acc))
    return acc
