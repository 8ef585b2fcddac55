"""Grouped products with packed expert weights: gate+up, down, and their backward.

Rows are routed (token, expert) pairs sorted by expert (``routing.py``). Every kernel walks the work
items of experts ``first_expert..last_expert - 1``, an item being (row tile, column tile), in
strides of the grid; their number is read on the device: the host never waits for the routing.

Shapes: N tokens, M routed rows, D model (latent) dim, F expert hidden dim, E local experts, R rank.
"""

import triton
import triton.language as tl

from k3tune_kernels.moe_lora.tiles import (
    dot_weight,
    dot_weight_transposed,
    expand_lora,
    expert_weight,
)
from k3tune_kernels.situ_glu.triton_kernels import situ_value, situ_value_and_slopes

_RUN_TIME_INTEGERS = ["first_expert", "last_expert"]


@triton.jit
def _row_tile(item, columns, expert_of_tile, row_of_tile, row_offsets, BLOCK_M: tl.constexpr):
    """Column tile, expert, first row (int64) and the mask of the rows of one work item.

    The rows of a tile are consecutive: kernels move their pointers to the first one and count in
    int32 from there, which spares the registers of 64-bit offsets.
    """
    tile = item // columns
    expert = tl.load(expert_of_tile + tile)
    first_row = tl.load(row_of_tile + tile)
    inside_M = tl.arange(0, BLOCK_M) < tl.load(row_offsets + expert + 1) - first_row
    return item % columns, expert, first_row.to(tl.int64), inside_M


@triton.jit(do_not_specialize=_RUN_TIME_INTEGERS)
def _gate_up_fwd_kernel(
    x,
    token_of_row,
    gate_packed,
    gate_scale,
    up_packed,
    up_scale,
    gate_narrow,
    gate_B,
    up_narrow,
    up_B,
    gate_out,
    up_out,
    hidden_out,
    expert_of_tile,
    row_of_tile,
    tile_offsets,
    row_offsets,
    first_expert,
    last_expert,
    D,
    F,
    gate_B_stride,
    up_B_stride,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    STORE_GATE_UP: tl.constexpr,
    STORE_HIDDEN: tl.constexpr,
    PIECES: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``SiTU(x Wg^T + LoRA, x Wu^T + LoRA)`` for a ``[BLOCK_M, BLOCK_N]`` tile of ``[M, F]``.

    x is ``[N, D]``, read by token; narrow factors are fp32 ``[M, R]``. Stores gate and up, or the
    activation, or both.
    """
    columns = tl.cdiv(F, BLOCK_N)
    begin = tl.load(tile_offsets + first_expert) * columns
    end = tl.load(tile_offsets + last_expert) * columns
    for item in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        column, expert, first_row, inside_M = _row_tile(
            item, columns, expert_of_tile, row_of_tile, row_offsets, BLOCK_M
        )
        row_M = tl.arange(0, BLOCK_M)
        token_M = tl.load(token_of_row + first_row + row_M, mask=inside_M, other=0).to(tl.int64)
        columns_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_N = columns_N < F
        Wg, Sg = expert_weight(gate_packed, gate_scale, expert, first_expert, F, D, MODE)
        Wu, Su = expert_weight(up_packed, up_scale, expert, first_expert, F, D, MODE)
        gate_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            x_MK = tl.load(
                x + token_M[:, None] * D + k_K[None, :],
                mask=inside_M[:, None] & (k_K < D)[None, :],
                other=0.0,
            )
            gate_MN = dot_weight_transposed(
                gate_MN, x_MK, Wg, Sg, columns_N, k, F, D, BLOCK_K, MODE
            )
            up_MN = dot_weight_transposed(up_MN, x_MK, Wu, Su, columns_N, k, F, D, BLOCK_K, MODE)
        dtype = x.dtype.element_ty
        if GATE_RANK > 0:
            factor = gate_B + expert.to(tl.int64) * gate_B_stride
            gate_MN = expand_lora(
                gate_MN, gate_narrow, factor, first_row, inside_M, columns_N, inside_N,
                GATE_RANK, 1, GATE_RANK, BLOCK_R, dtype,
            )  # fmt: skip
        if UP_RANK > 0:
            factor = up_B + expert.to(tl.int64) * up_B_stride
            up_MN = expand_lora(
                up_MN, up_narrow, factor, first_row, inside_M, columns_N, inside_N,
                UP_RANK, 1, UP_RANK, BLOCK_R, dtype,
            )  # fmt: skip
        # Narrow pieces: the activation of a whole tile at once does not fit the registers.
        COLUMNS: tl.constexpr = BLOCK_N // PIECES
        for piece in tl.static_range(0, PIECES):
            gate_MP = _columns(gate_MN, piece, PIECES)
            up_MP = _columns(up_MN, piece, PIECES)
            columns_P = column * BLOCK_N + piece * COLUMNS + tl.arange(0, COLUMNS)
            at_MP = row_M[:, None] * F + columns_P[None, :]
            inside_MP = inside_M[:, None] & (columns_P < F)[None, :]
            if STORE_GATE_UP:
                tl.store(gate_out + first_row * F + at_MP, gate_MP.to(dtype), mask=inside_MP)
                tl.store(up_out + first_row * F + at_MP, up_MP.to(dtype), mask=inside_MP)
            if STORE_HIDDEN:
                hidden_MP = situ_value(gate_MP, up_MP, BETA, LINEAR_BETA)
                tl.store(hidden_out + first_row * F + at_MP, hidden_MP.to(dtype), mask=inside_MP)


@triton.jit(do_not_specialize=_RUN_TIME_INTEGERS)
def _down_fwd_kernel(
    hidden,
    packed,
    scale,
    narrow,
    lora_B,
    out,
    expert_of_tile,
    row_of_tile,
    tile_offsets,
    row_offsets,
    first_expert,
    last_expert,
    D,
    F,
    B_stride,
    RANK: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``hidden Wd^T + LoRA`` for a ``[BLOCK_M, BLOCK_N]`` tile of ``[M, D]``; hidden ``[M, F]``."""
    columns = tl.cdiv(D, BLOCK_N)
    begin = tl.load(tile_offsets + first_expert) * columns
    end = tl.load(tile_offsets + last_expert) * columns
    for item in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        column, expert, first_row, inside_M = _row_tile(
            item, columns, expert_of_tile, row_of_tile, row_offsets, BLOCK_M
        )
        row_M = tl.arange(0, BLOCK_M)
        columns_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_N = columns_N < D
        W, S = expert_weight(packed, scale, expert, first_expert, D, F, MODE)
        out_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, F, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            hidden_MK = tl.load(
                hidden + first_row * F + row_M[:, None] * F + k_K[None, :],
                mask=inside_M[:, None] & (k_K < F)[None, :],
                other=0.0,
            )
            out_MN = dot_weight_transposed(
                out_MN, hidden_MK, W, S, columns_N, k, D, F, BLOCK_K, MODE
            )
        dtype = hidden.dtype.element_ty
        if RANK > 0:
            factor = lora_B + expert.to(tl.int64) * B_stride
            out_MN = expand_lora(
                out_MN, narrow, factor, first_row, inside_M, columns_N, inside_N,
                RANK, 1, RANK, BLOCK_R, dtype,
            )  # fmt: skip
        at_MN = row_M[:, None] * D + columns_N[None, :]
        tl.store(
            out + first_row * D + at_MN,
            out_MN.to(dtype),
            mask=inside_M[:, None] & inside_N[None, :],
        )


@triton.jit(do_not_specialize=_RUN_TIME_INTEGERS)
def _down_bwd_dh_kernel(
    dy,
    token_of_row,
    weight_of_row,
    packed,
    scale,
    narrow,
    lora_A,
    gate,
    up,
    dot_partial,
    expert_of_tile,
    row_of_tile,
    tile_offsets,
    row_offsets,
    first_expert,
    last_expert,
    M,
    D,
    F,
    A_stride,
    RANK: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    PIECES: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """From dy ``[N, D]`` through down and SiTU-GLU, a ``[BLOCK_M, BLOCK_N]`` tile of ``[M, F]``.

    With ``dh = dy Wd + LoRA`` of a row before its routing weight w: puts ``w dh dh/dg`` and
    ``w dh dh/du`` in the place of gate and up, and stores ``sum_tile(h dh)``, whose sum over column
    tiles is the gradient of w.
    """
    columns = tl.cdiv(F, BLOCK_N)
    begin = tl.load(tile_offsets + first_expert) * columns
    end = tl.load(tile_offsets + last_expert) * columns
    for item in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        column, expert, first_row, inside_M = _row_tile(
            item, columns, expert_of_tile, row_of_tile, row_offsets, BLOCK_M
        )
        row_M = tl.arange(0, BLOCK_M)
        token_M = tl.load(token_of_row + first_row + row_M, mask=inside_M, other=0).to(tl.int64)
        columns_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_N = columns_N < F
        W, S = expert_weight(packed, scale, expert, first_expert, D, F, MODE)
        dh_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            dy_MK = tl.load(
                dy + token_M[:, None] * D + k_K[None, :],
                mask=inside_M[:, None] & (k_K < D)[None, :],
                other=0.0,
            )
            dh_MN = dot_weight(
                dh_MN, dy_MK, W, S, k, column * BLOCK_N, D, F, BLOCK_K, BLOCK_N, MODE
            )
        dtype = dy.dtype.element_ty
        if RANK > 0:
            factor = lora_A + expert.to(tl.int64) * A_stride
            dh_MN = expand_lora(
                dh_MN, narrow, factor, first_row, inside_M, columns_N, inside_N,
                1, F, RANK, BLOCK_R, dtype,
            )  # fmt: skip
        weight_M = tl.load(weight_of_row + first_row + row_M, mask=inside_M, other=0.0)
        start = first_row * F
        dot_M = tl.zeros((BLOCK_M,), tl.float32)
        # Narrow pieces: the derivatives of a whole tile at once do not fit the registers.
        for piece in tl.static_range(0, PIECES):
            dh_MP = _columns(dh_MN, piece, PIECES)
            dot_M += _situ_bwd(
                dh_MP, weight_M, gate + start, up + start, row_M, inside_M,
                column * BLOCK_N + piece * (BLOCK_N // PIECES),
                F, BETA, LINEAR_BETA, BLOCK_N // PIECES,
            )  # fmt: skip
        tl.store(dot_partial + column.to(tl.int64) * M + first_row + row_M, dot_M, mask=inside_M)


@triton.jit
def _columns(tile_MN, piece: tl.constexpr, PIECES: tl.constexpr):
    """One of PIECES (a power of two) equal stretches of columns."""
    if PIECES == 1:
        result = tile_MN
    else:
        M: tl.constexpr = tile_MN.shape[0]
        HALF: tl.constexpr = tile_MN.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(tile_MN, (M, 2, HALF)), (0, 2, 1)))
        if piece < PIECES // 2:
            result = _columns(left, piece, PIECES // 2)
        else:
            result = _columns(right, piece - PIECES // 2, PIECES // 2)
    return result


@triton.jit
def _situ_bwd(
    dh_MN,
    weight_M,
    gate,
    up,
    row_M,
    inside_M,
    first_column,
    F,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """From dh before its routing weight through SiTU-GLU, in place; ``sum(h dh)`` of each row."""
    columns_N = first_column + tl.arange(0, COLUMNS)
    at_MN = row_M[:, None] * F + columns_N[None, :]
    inside_MN = inside_M[:, None] & (columns_N < F)[None, :]
    gate_MN = tl.load(gate + at_MN, mask=inside_MN, other=0.0).to(tl.float32)
    up_MN = tl.load(up + at_MN, mask=inside_MN, other=0.0).to(tl.float32)
    hidden_MN, slope_gate_MN, slope_up_MN = situ_value_and_slopes(gate_MN, up_MN, BETA, LINEAR_BETA)
    dtype = gate.dtype.element_ty
    weighted_MN = dh_MN * weight_M[:, None]
    tl.store(gate + at_MN, (weighted_MN * slope_gate_MN).to(dtype), mask=inside_MN)
    tl.store(up + at_MN, (weighted_MN * slope_up_MN).to(dtype), mask=inside_MN)
    return tl.sum(hidden_MN * dh_MN, axis=1)


@triton.jit(do_not_specialize=_RUN_TIME_INTEGERS)
def _gate_up_bwd_dx_kernel(
    d_gate,
    d_up,
    gate_packed,
    gate_scale,
    up_packed,
    up_scale,
    gate_narrow,
    gate_A,
    up_narrow,
    up_A,
    dx_out,
    expert_of_tile,
    row_of_tile,
    tile_offsets,
    row_offsets,
    first_expert,
    last_expert,
    D,
    F,
    gate_A_stride,
    up_A_stride,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``dg Wg + du Wu + LoRA`` for a ``[BLOCK_M, BLOCK_N]`` tile of ``[M, D]``, one accumulator."""
    columns = tl.cdiv(D, BLOCK_N)
    begin = tl.load(tile_offsets + first_expert) * columns
    end = tl.load(tile_offsets + last_expert) * columns
    for item in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        column, expert, first_row, inside_M = _row_tile(
            item, columns, expert_of_tile, row_of_tile, row_offsets, BLOCK_M
        )
        row_M = tl.arange(0, BLOCK_M)
        first_column = column * BLOCK_N
        columns_N = first_column + tl.arange(0, BLOCK_N)
        inside_N = columns_N < D
        dtype = d_gate.dtype.element_ty
        dx_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        W, S = expert_weight(gate_packed, gate_scale, expert, first_expert, F, D, MODE)
        for k in range(0, F, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            dy_MK = tl.load(
                d_gate + first_row * F + row_M[:, None] * F + k_K[None, :],
                mask=inside_M[:, None] & (k_K < F)[None, :],
                other=0.0,
            )
            dx_MN = dot_weight(dx_MN, dy_MK, W, S, k, first_column, F, D, BLOCK_K, BLOCK_N, MODE)
        W, S = expert_weight(up_packed, up_scale, expert, first_expert, F, D, MODE)
        for k in range(0, F, BLOCK_K):
            k_K = k + tl.arange(0, BLOCK_K)
            dy_MK = tl.load(
                d_up + first_row * F + row_M[:, None] * F + k_K[None, :],
                mask=inside_M[:, None] & (k_K < F)[None, :],
                other=0.0,
            )
            dx_MN = dot_weight(dx_MN, dy_MK, W, S, k, first_column, F, D, BLOCK_K, BLOCK_N, MODE)
        if GATE_RANK > 0:
            factor = gate_A + expert.to(tl.int64) * gate_A_stride
            dx_MN = expand_lora(
                dx_MN, gate_narrow, factor, first_row, inside_M, columns_N, inside_N,
                1, D, GATE_RANK, BLOCK_R, dtype,
            )  # fmt: skip
        if UP_RANK > 0:
            factor = up_A + expert.to(tl.int64) * up_A_stride
            dx_MN = expand_lora(
                dx_MN, up_narrow, factor, first_row, inside_M, columns_N, inside_N,
                1, D, UP_RANK, BLOCK_R, dtype,
            )  # fmt: skip
        at_MN = row_M[:, None] * D + columns_N[None, :]
        tl.store(
            dx_out + first_row * D + at_MN,
            dx_MN.to(dtype),
            mask=inside_M[:, None] & inside_N[None, :],
        )
