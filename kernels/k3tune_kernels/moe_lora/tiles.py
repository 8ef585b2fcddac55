"""Device functions of the expert kernels: weight tiles, LoRA tiles, row tiles.

A weight of one expert is ``[O, I]``. The forward contracts over I, the packed axis, along which the
scales lie; the backward contracts over O. ``MODE`` says how a weight reaches the product:

- ``"scaled"``: packed, through ``tl.dot_scaled`` (forward) or decoded to bf16 by bits (backward);
- ``"bits"``: packed, decoded by integer bits to fp32, with no bf16 value in the kernel;
- ``"decoded"``: from a scratch in the dtype of the activations, ``packed`` pointing there.

Shapes: M rows of a tile, N its columns, K the contracted axis, R LoRA rank.
"""

import triton
import triton.language as tl


@triton.jit
def decode_bf16(packed, scale):
    """``[P, Q/2]`` bytes and ``[P, Q/32]`` scales to ``[P, Q]`` bf16, exact.

    The three magnitude bits land in the low exponent and high mantissa bits of a bf16; a product
    with 2^126 makes them the E2M1 value. 0.5 arrives as a subnormal: denormals must stay on.
    """
    byte = packed.to(tl.uint16)
    low = ((byte & 0x8) << 12) | ((byte & 0x7) << 6)
    high = ((byte & 0x80) << 8) | ((byte & 0x70) << 2)
    values = tl.interleave(low, high).to(tl.bfloat16, bitcast=True)
    values = values * tl.full((), 2.0**126, tl.bfloat16)
    exponent = scale.to(tl.uint16)
    # Byte 0 is 2^-127, a bf16 subnormal; byte 255 is NaN.
    bits = tl.where(exponent == 0, 0x40, exponent << 7)
    bits = tl.where(exponent == 255, 0x7FC0, bits).to(tl.uint16)
    return _scaled_by_group(values, bits.to(tl.bfloat16, bitcast=True))


@triton.jit
def decode_fp32(packed, scale):
    """``[P, Q/2]`` bytes and ``[P, Q/32]`` scales to ``[P, Q]`` fp32 by integer bits, exact."""
    byte = packed.to(tl.int32)
    values = tl.interleave(_e2m1_bits(byte & 15), _e2m1_bits(byte >> 4))
    exponent = scale.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return _scaled_by_group(values.to(tl.float32, bitcast=True), bits.to(tl.float32, bitcast=True))


@triton.jit
def _e2m1_bits(code):
    """fp32 bits of a 4-bit code: from 1.0 up a rebased exponent, below that 0 or 0.5."""
    magnitude = code & 7
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, magnitude * 0x3F000000)
    return bits | ((code & 8) << 28)


@triton.jit
def _scaled_by_group(values, scale):
    P: tl.constexpr = values.shape[0]
    Q: tl.constexpr = values.shape[1]
    grouped = tl.reshape(values, (P, Q // 32, 32)) * scale[:, :, None]
    return tl.reshape(grouped, (P, Q))


@triton.jit
def expert_weight(packed, scale, expert, first_expert, out_dim, in_dim, MODE: tl.constexpr):
    """Pointers to one expert's weight; the scratch of ``"decoded"`` begins at ``first_expert``."""
    # All experts together pass 2^31 elements.
    if MODE == "decoded":
        packed = packed + (expert - first_expert).to(tl.int64) * out_dim * in_dim
    else:
        row = expert.to(tl.int64) * out_dim
        packed = packed + row * (in_dim // 2)
        scale = scale + row * (in_dim // 32)
    return packed, scale


@triton.jit
def dot_weight_transposed(
    acc_MN,
    x_MK,
    packed,
    scale,
    outputs_N,
    k,
    out_dim,
    in_dim,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
):
    """``acc + x @ W[outputs, k : k + BLOCK_K].T``."""
    inside_N = outputs_N < out_dim
    if MODE == "decoded":
        k_K = k + tl.arange(0, BLOCK_K)
        w_KN = tl.load(
            packed + outputs_N[None, :] * in_dim + k_K[:, None],
            mask=inside_N[None, :] & (k_K < in_dim)[:, None],
            other=0.0,
        )
        acc_MN = tl.dot(x_MK, w_KN, acc_MN, input_precision="ieee")
    else:
        byte = k // 2 + tl.arange(0, BLOCK_K // 2)
        group = k // 32 + tl.arange(0, BLOCK_K // 32)
        scale_NG = tl.load(
            scale + outputs_N[:, None] * (in_dim // 32) + group[None, :],
            mask=inside_N[:, None] & (group < in_dim // 32)[None, :],
            other=127,
        )
        packed_BN = tl.load(
            packed + outputs_N[None, :] * (in_dim // 2) + byte[:, None],
            mask=inside_N[None, :] & (byte < in_dim // 2)[:, None],
            other=0,
        )
        if MODE == "scaled":
            acc_MN = tl.dot_scaled(x_MK, None, "bf16", packed_BN, scale_NG, "e2m1", acc_MN)
        else:
            w_NK = decode_fp32(tl.trans(packed_BN), scale_NG)
            acc_MN = tl.dot(x_MK, tl.trans(w_NK), acc_MN, input_precision="ieee")
    return acc_MN


@triton.jit
def dot_weight(
    acc_MN,
    dy_MK,
    packed,
    scale,
    k,
    first_input,
    out_dim,
    in_dim,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MODE: tl.constexpr,
):
    """``acc + dy @ W[k : k + BLOCK_K, first_input : first_input + BLOCK_N]``."""
    outputs_K = k + tl.arange(0, BLOCK_K)
    inside_K = outputs_K < out_dim
    if MODE == "decoded":
        inputs_N = first_input + tl.arange(0, BLOCK_N)
        w_KN = tl.load(
            packed + outputs_K[:, None] * in_dim + inputs_N[None, :],
            mask=inside_K[:, None] & (inputs_N < in_dim)[None, :],
            other=0.0,
        )
    else:
        byte = first_input // 2 + tl.arange(0, BLOCK_N // 2)
        group = first_input // 32 + tl.arange(0, BLOCK_N // 32)
        packed_KB = tl.load(
            packed + outputs_K[:, None] * (in_dim // 2) + byte[None, :],
            mask=inside_K[:, None] & (byte < in_dim // 2)[None, :],
            other=0,
        )
        scale_KG = tl.load(
            scale + outputs_K[:, None] * (in_dim // 32) + group[None, :],
            mask=inside_K[:, None] & (group < in_dim // 32)[None, :],
            other=127,
        )
        if MODE == "scaled":
            w_KN = decode_bf16(packed_KB, scale_KG)
        else:
            w_KN = decode_fp32(packed_KB, scale_KG)
    return tl.dot(dy_MK, w_KN, acc_MN, input_precision="ieee")


@triton.jit
def dot_narrow(acc, narrow, wide):
    """``acc + narrow @ wide`` with an fp32 ``narrow``.

    Against a bf16 ``wide`` the narrow factor goes as two bf16 terms, which keep 16 of its bits.
    """
    if wide.dtype == tl.float32:
        acc = tl.dot(narrow, wide, acc, input_precision="ieee")
    else:
        high = narrow.to(tl.bfloat16)
        low = (narrow - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, wide, tl.dot(high, wide, acc))
    return acc


@triton.jit
def expand_lora(
    acc_MN,
    narrow,
    factor,
    first_row,
    inside_M,
    columns_N,
    inside_N,
    stride_column,
    stride_rank,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``acc + narrow[rows] @ factor``; narrow is fp32 ``[M, RANK]`` with the scaling in it."""
    row_M = tl.arange(0, inside_M.shape[0])
    narrow += first_row * RANK
    for first in tl.range(0, RANK, BLOCK_R, num_stages=1):
        rank_R = first + tl.arange(0, BLOCK_R)
        narrow_MR = tl.load(
            narrow + row_M[:, None] * RANK + rank_R[None, :],
            mask=inside_M[:, None] & (rank_R < RANK)[None, :],
            other=0.0,
        )
        factor_RN = tl.load(
            factor + rank_R[:, None] * stride_rank + columns_N[None, :] * stride_column,
            mask=(rank_R < RANK)[:, None] & inside_N[None, :],
            other=0.0,
        )
        acc_MN = dot_narrow(acc_MN, narrow_MR, factor_RN.to(DTYPE))
    return acc_MN
