"""The attention-residual mixer in Triton. The equations are in ``reference.py``.

Letters: N tokens, S sources, D channels, P programs of the backward pass.

A token's row is one tile in registers. The forward pass reads each source once: the softmax over
sources is taken as they come, rescaling the running sum. The backward pass needs every score's
gradient before the first source's, so it reads a token's sources twice, the second time from
cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Programs of the backward pass: each sums the weights' gradient over its share of the tokens.
# A constant, not the device's processor count, so that the order of the sum is the same
# everywhere.
BACKWARD_PROGRAMS = 512
# Scores of a token: MAX_TRITON_SOURCES of the op, as a power of two.
BLOCK_S = 16


def options(block_channels: int) -> dict[str, int]:
    """Launch options for rows of this padded width: 16 values a thread, where a warp has 32."""
    # Triton 3.10 turns fp fusion off by default.
    return {"num_warps": min(max(block_channels // 512, 1), 16), "enable_fp_fusion": True}


@triton.jit
def _pick(values_S, i, BLOCK_S: tl.constexpr):
    """The i-th value of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_S) == i, values_S, 0.0))


@triton.jit
def _pointer(pointers, i, NUM_SOURCES: tl.constexpr):
    """The i-th pointer of a tuple, for an i known only when it runs.

    The loops over sources stay loops because of it: unrolled, the compiler starts all nine loads
    at once and spills registers.
    """
    pointer = pointers[0]
    for k in tl.static_range(1, NUM_SOURCES):
        pointer = tl.where(i == k, pointers[k], pointer)
    return pointer


@triton.jit
def _load_source(sources, i, row, inside, NUM_SOURCES: tl.constexpr):
    """A token's row of the i-th source, in fp32."""
    s = tl.load(_pointer(sources, i, NUM_SOURCES) + row, mask=inside, other=0.0)
    return s.to(tl.float32)


@triton.jit
def _attention_residual_fwd_kernel(
    sources,
    norm_weight,
    query_weight,
    mix,
    weights,
    inverse_rms,
    eps,
    width,
    NUM_SOURCES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid ``(N,)``: a program mixes one token. ``sources`` is a tuple of ``[N, D]`` pointers."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < width
    row = token * width + channel
    index_S = tl.arange(0, BLOCK_S)
    q = tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
    q *= tl.load(query_weight + channel, mask=inside, other=0.0).to(tl.float32)
    scores_S = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    rms_S = tl.zeros((BLOCK_S,), tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    largest = float("-inf")
    for i in range(NUM_SOURCES):
        s = _load_source(sources, i, row, inside, NUM_SOURCES)
        r = tl.rsqrt(tl.sum(s * s) / width + eps)
        score = tl.sum(s * q) * r
        new_largest = tl.maximum(largest, score)
        total = total * tl.exp(largest - new_largest) + tl.exp(score - new_largest) * s
        largest = new_largest
        scores_S = tl.where(index_S == i, score, scores_S)
        rms_S = tl.where(index_S == i, r, rms_S)
    exponentials_S = tl.exp(scores_S - largest)
    denominator = tl.sum(exponentials_S)
    at = token * NUM_SOURCES + index_S
    tl.store(weights + at, exponentials_S / denominator, mask=index_S < NUM_SOURCES)
    tl.store(inverse_rms + at, rms_S, mask=index_S < NUM_SOURCES)
    out = (total / denominator).to(mix.dtype.element_ty)
    tl.store(mix + row, out, mask=inside)


@triton.jit
def _attention_residual_bwd_kernel(
    grad,
    sources,
    norm_weight,
    query_weight,
    weights,
    inverse_rms,
    d_sources,
    d_query_norm,
    num_tokens,
    width,
    SUM_WEIGHTS: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid ``(P,)``: a program takes ``ceil(N / P)`` consecutive tokens.

    It writes the sources' gradients of its tokens and, with ``SUM_WEIGHTS``, the sum over its
    tokens of the gradient of ``norm * query`` to its row of ``d_query_norm`` ``[P, D]``.
    """
    program = tl.program_id(0).to(tl.int64)
    share = tl.cdiv(num_tokens, tl.num_programs(0))
    channel = tl.arange(0, BLOCK_D)
    inside = channel < width
    index_S = tl.arange(0, BLOCK_S)
    q = tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
    q *= tl.load(query_weight + channel, mask=inside, other=0.0).to(tl.float32)
    d_q = tl.zeros((BLOCK_D,), tl.float32)
    for token in range(program * share, tl.minimum((program + 1) * share, num_tokens)):
        row = token * width + channel
        g = tl.load(grad + row, mask=inside, other=0.0).to(tl.float32)
        at = token * NUM_SOURCES + index_S
        a_S = tl.load(weights + at, mask=index_S < NUM_SOURCES, other=0.0)
        r_S = tl.load(inverse_rms + at, mask=index_S < NUM_SOURCES, other=0.0)
        d_a_S = tl.zeros((BLOCK_S,), tl.float32)
        p_S = tl.zeros((BLOCK_S,), tl.float32)
        for i in range(NUM_SOURCES):
            s = _load_source(sources, i, row, inside, NUM_SOURCES)
            d_a_S = tl.where(index_S == i, tl.sum(g * s), d_a_S)
            p_S = tl.where(index_S == i, tl.sum(q * s), p_S)
        through_norm_S = a_S * (d_a_S - tl.sum(a_S * d_a_S)) * r_S
        curvature_S = r_S * r_S * p_S / width
        for i in range(NUM_SOURCES):
            s = _load_source(sources, i, row, inside, NUM_SOURCES)
            through_norm = _pick(through_norm_S, i, BLOCK_S)
            d_s = _pick(a_S, i, BLOCK_S) * g
            d_s += through_norm * (q - _pick(curvature_S, i, BLOCK_S) * s)
            d_source = _pointer(d_sources, i, NUM_SOURCES)
            tl.store(d_source + row, d_s.to(d_source.dtype.element_ty), mask=inside)
            if SUM_WEIGHTS:
                d_q += through_norm * s
    if SUM_WEIGHTS:
        tl.store(d_query_norm + program * width + channel, d_q, mask=inside)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[N, D]``, a view where the tensor is contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def forward(
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`reference.forward`, for bf16 and fp32; strided sources are copied first."""
    first = sources[0]
    tokens, width = first.shape[:-1], first.shape[-1]
    mix = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    weights_S = torch.empty((*tokens, len(sources)), dtype=torch.float32, device=first.device)
    inverse_rms_S = torch.empty_like(weights_S)
    if mix.numel():
        block = triton.next_power_of_2(width)
        _attention_residual_fwd_kernel[(tokens.numel(),)](
            tuple(_rows(source) for source in sources),
            norm_weight_D.contiguous(),
            query_weight_D.contiguous(),
            mix,
            weights_S,
            inverse_rms_S,
            eps,
            width,
            NUM_SOURCES=len(sources),
            BLOCK_S=BLOCK_S,
            BLOCK_D=block,
            **options(block),
        )
    return mix, weights_S, inverse_rms_S


def backward(
    grad: torch.Tensor,
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    weights_S: torch.Tensor,
    inverse_rms_S: torch.Tensor,
    *,
    sum_weights: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As :func:`reference.backward`, for bf16 and fp32; strided tensors are copied first."""
    first = sources[0]
    num_tokens, width = first.shape[:-1].numel(), first.shape[-1]
    d_sources = [torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in sources]
    programs = min(num_tokens, BACKWARD_PROGRAMS)
    d_q_PD = torch.empty(
        (programs if sum_weights else 0, width), dtype=torch.float32, device=first.device
    )
    if first.numel():
        block = triton.next_power_of_2(width)
        _attention_residual_bwd_kernel[(programs,)](
            _rows(grad),
            tuple(_rows(source) for source in sources),
            norm_weight_D.contiguous(),
            query_weight_D.contiguous(),
            weights_S,
            inverse_rms_S,
            tuple(d_sources),
            d_q_PD,
            num_tokens,
            width,
            SUM_WEIGHTS=sum_weights,
            NUM_SOURCES=len(sources),
            BLOCK_S=BLOCK_S,
            BLOCK_D=block,
            **options(block),
        )
    return d_sources, d_q_PD.sum(0) if sum_weights else None
