"""Combining routed rows into tokens, and decoding weights into a scratch.

Shapes: N tokens, A active experts a token, M routed rows, D width of a row.
"""

import triton
import triton.language as tl

from k3tune_kernels.moe_lora.tiles import decode_bf16, decode_fp32


@triton.jit
def _combine_rows_kernel(
    rows,
    row_of_slot,
    weight_of_slot,
    out,
    N,
    A,
    D,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out[n] = sum_a w[n, a] * rows[row[n, a]]`` in fp32, slots in order; row -1 adds nothing.

    Grid (token tiles, column tiles); a program computes ``[BLOCK_M, BLOCK_N]`` of ``[N, D]``.
    """
    token_M = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_M = token_M < N
    inside_N = columns_N < D
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for slot in range(0, A):
        row_M = tl.load(row_of_slot + token_M * A + slot, mask=inside_M, other=-1)
        term_MN = tl.load(
            rows + row_M.to(tl.int64)[:, None] * D + columns_N[None, :],
            mask=(row_M >= 0)[:, None] & inside_N[None, :],
            other=0.0,
        ).to(tl.float32)
        if WEIGHTED:
            weight_M = tl.load(weight_of_slot + token_M * A + slot, mask=inside_M, other=0.0)
            term_MN = term_MN * weight_M[:, None]
        # A weight that is not finite must not reach a token through a row that is not here.
        acc_MN += tl.where((row_M >= 0)[:, None], term_MN, 0.0)
    tl.store(
        out + token_M[:, None] * D + columns_N[None, :],
        acc_MN.to(out.dtype.element_ty),
        mask=inside_M[:, None] & inside_N[None, :],
    )


@triton.jit
def _dequantise_kernel(
    packed,
    scale,
    out,
    num_rows,
    in_dim,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Decode ``[BLOCK_M, BLOCK_N]`` of ``[num_rows, in_dim]`` into bf16 or fp32, as ``out`` is.

    Grid (row tiles, column tiles).
    """
    row_M = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside_M = row_M < num_rows
    byte = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    group = tl.program_id(1) * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
    packed_MB = tl.load(
        packed + row_M[:, None] * (in_dim // 2) + byte[None, :],
        mask=inside_M[:, None] & (byte < in_dim // 2)[None, :],
        other=0,
    )
    scale_MG = tl.load(
        scale + row_M[:, None] * (in_dim // 32) + group[None, :],
        mask=inside_M[:, None] & (group < in_dim // 32)[None, :],
        other=127,
    )
    if out.dtype.element_ty == tl.float32:
        values_MN = decode_fp32(packed_MB, scale_MG)
    else:
        values_MN = decode_bf16(packed_MB, scale_MG)
    columns_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(
        out + row_M[:, None] * in_dim + columns_N[None, :],
        values_MN,
        mask=inside_M[:, None] & (columns_N < in_dim)[None, :],
    )
