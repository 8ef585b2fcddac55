"""The gated delta rule in matrix form, a chunk of tokens at a time: where no kernel runs.

Shape letters: ``B`` batch, ``T`` tokens, ``H`` heads, ``K`` / ``V`` key / value head width, ``N``
documents, ``Z`` chunks of all of them, ``C`` tokens in a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from k3tune_kernels.kda_rule.grid import ChunkGrid, chunk_grid

# measured on a CPU: half the time of 64 at head width 32, 4 / 5 of it at 128
CHUNK_SIZE = 32
# Within a tile the decays' exponents stay inside fp32: 16 tokens of at least exp(-5) each.
_TILE = 16


def kda_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor,
    bounds: Tensor,
    state_BHKV: Tensor | None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """:func:`k3tune_kernels.kda_rule.kda_rule`, ``chunk_size`` tokens at a time.

    With ``G`` the inclusive cumulative log-decay inside a chunk, and ``j < i``::

        A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd);   T = (I + A)^-1 diag(beta)
        U = T V;   Y = T (exp(G) * K);   W = U - Y S
        O = (exp(G) * Q) S + tril(sum_d q_id k_jd exp(G_id - G_jd)) W
        S <- diag(exp(G_C)) S + (exp(G_C - G) * K)^T W

    Every document begins a chunk; a padded token at the end of its last one decays nothing and
    writes nothing.
    """
    batch, length = q_BTHK.shape[:2]
    grid = chunk_grid(bounds, length, chunk_size)
    q, k, v, g = (grid.fill(x) for x in (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK))
    beta = grid.fill(beta_BTH[..., None])
    # differences of large sums: in fp32 the exponent would be off by 1e-5 after 64 tokens
    cumulative = g.double().cumsum(-2)
    pairs, scores = _decayed_products((k, q), k, cumulative)
    reads = cumulative.to(g.dtype).exp()
    writes = (cumulative[..., -1:, :] - cumulative).to(g.dtype).exp()
    right = torch.cat([v, reads * k], dim=-1) * beta
    solved = torch.linalg.solve_triangular(
        pairs.tril(-1) * beta, right, upper=False, unitriangular=True
    )
    u, y = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    keeps = reads[..., -1, :, None]
    tensors = (u, y, reads * q, scores.tril(), writes * k, keeps)
    begin = None if state_BHKV is None else _begin(state_BHKV, grid)
    output, value = _scan(tensors, grid.steps, begin)
    return grid.empty(output, batch), value[grid.last_B]


def _begin(state_BHKV: Tensor, grid: ChunkGrid) -> Tensor:
    """State each document of the grid begins with, ``[N, H, K, V]``."""
    zeros = state_BHKV.new_zeros(grid.steps[0], *state_BHKV.shape[1:])
    return zeros.index_copy(0, grid.first_B, state_BHKV)


def _scan(
    tensors: Sequence[Tensor], steps: Sequence[int], value: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Carry the states over the chunks.

    Args:
        tensors: U, Y, reading queries, scores, writing keys, decays; ``[Z, H, ...]`` each.
        steps: chunks of each step.
        value: states at the beginning, ``[N, H, K, V]``; None for zero.

    Returns:
        ``[Z, H, C, V]`` outputs and the states at each document's end.
    """
    outputs, ended = [], []
    # split, not sliced: its gradient is one concatenation
    for u, y, q, scores, k, keeps in zip(*(x.split(steps) for x in tensors), strict=True):
        if value is None:
            outputs.append(scores @ u)
            value = k.transpose(-1, -2) @ u
            continue
        value, end = value.split([len(u), len(value) - len(u)])
        ended.append(end)
        w = u - y @ value
        outputs.append(q @ value + scores @ w)
        value = keeps * value + k.transpose(-1, -2) @ w
    assert value is not None, "no chunk"
    return torch.cat(outputs), torch.cat([value, *reversed(ended)])


def _decayed_products(rows: Sequence[Tensor], b: Tensor, cumulative: Tensor) -> list[Tensor]:
    """``sum_d a_id b_jd exp(G_id - G_jd)`` for j <= i and each ``a``; arbitrary for j > i.

    ``cumulative`` is G in fp64. Rows go in tiles: both exponents are taken relative to the tile's
    middle, which keeps every factor inside fp32 however long the chunk.
    """
    size = b.shape[-2]
    products: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, size, _TILE):
        stop = min(start + _TILE, size)
        middle = cumulative[..., (start + stop - 1) // 2, :][..., None, :]
        grows = (cumulative[..., start:stop, :] - middle).to(b.dtype).exp()
        right = b[..., :stop, :] * (middle - cumulative[..., :stop, :]).to(b.dtype).exp()
        for a, tiles in zip(rows, products, strict=True):
            left = a[..., start:stop, :] * grows
            tiles.append(F.pad(left @ right.transpose(-1, -2), (0, size - stop)))
    return [torch.cat(tiles, dim=-2) for tiles in products]
