"""The gated delta rule of Kimi Delta Attention: recurrent and chunked form, same result.

State ``S`` of a head, ``[K, V]``, starts at zero with each document. For token t (tech report
eq. 1 to 6; ``alpha = exp(log_decay)`` a channel)::

    S' = diag(alpha_t) S;   S = S' + beta_t k_t (v_t - S'^T k_t)^T;   o_t = S^T q_t

Shape letters: ``B`` batch, ``T`` tokens, ``H`` heads, ``K`` / ``V`` key / value head width, ``C``
tokens in a chunk, ``Z`` chunks. All inputs are fp32 (fp64 for gradient checks).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# measured on a CPU: half the time of 64 at head width 32, 4 / 5 of it at 128
CHUNK_SIZE = 32
# Within a tile the decays' exponents stay inside fp32: 16 tokens of at least exp(-5) each.
_TILE = 16


@dataclass(frozen=True)
class DeltaState:
    """What the rule carries from one token to the next.

    Attributes:
        value_BHKV: the state ``S``.
        document_B: number of the document it belongs to; None when each row is one document.
    """

    value_BHKV: Tensor
    document_B: Tensor | None = None


def kda_recurrent(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor,
    state: DeltaState,
    documents_BT: Tensor | None = None,
) -> tuple[Tensor, DeltaState]:
    """The rule token by token: decoding, and the truth for the chunked form.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries (already scaled), keys, values.
        log_decay_BTHK: log of the decay, at most 0.
        beta_BTH: writing strength, in (0, 1).
        state: what went before.
        documents_BT: document number of each token; None when all belong to the state's document.

    Returns:
        ``[B, T, H, V]`` outputs and the state after the last token.
    """
    value, document = state.value_BHKV, state.document_B
    outputs = []
    for t in range(q_BTHK.shape[1]):
        if documents_BT is not None:
            assert document is not None, "documents need the state's document"
            same = torch.eq(documents_BT[:, t], document)
            value = value * same[:, None, None, None]
            document = documents_BT[:, t]
        k, v = k_BTHK[:, t, :, :, None], v_BTHV[:, t, :, None, :]
        value = value * log_decay_BTHK[:, t].exp()[..., None]
        error = v - (k * value).sum(-2, keepdim=True)
        value = value + beta_BTH[:, t, :, None, None] * k * error
        outputs.append((q_BTHK[:, t, :, :, None] * value).sum(-2))
    return torch.stack(outputs, dim=1), DeltaState(value, document)


def kda_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor,
    state: DeltaState,
    documents_BT: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, DeltaState]:
    """The rule in matrix form, ``chunk_size`` tokens at a time; arguments of :func:`kda_recurrent`.

    With ``G`` the inclusive cumulative log-decay inside a chunk, and ``j < i``::

        A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd);   T = (I + A)^-1 diag(beta)
        U = T V;   Y = T (exp(G) * K);   W = U - Y S
        O = (exp(G) * Q) S + tril(sum_d q_id k_jd exp(G_id - G_jd)) W
        S <- diag(exp(G_C)) S + (exp(G_C - G) * K)^T W

    A pair of tokens of two documents is left out of A and O, and a token of another document than
    the state's does not read it: the reset needs no split of the row.
    """
    length = q_BTHK.shape[1]
    chunk_size = min(chunk_size, length)
    padding = -length % chunk_size
    # a padded token decays nothing and writes nothing
    q, k, v, g = (_chunks(x, padding, chunk_size) for x in (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK))
    beta = _chunks(beta_BTH[..., None], padding, chunk_size)
    # differences of large sums: in fp32 the exponent would be off by 1e-5 after 64 tokens
    cumulative = g.double().cumsum(-2)
    pairs = _decayed_products(k, k, cumulative).tril(-1) * beta
    scores = _decayed_products(q, k, cumulative).tril()
    reads = cumulative.to(g.dtype).exp()
    writes = (cumulative[..., -1:, :] - cumulative).to(g.dtype).exp()
    keeps = reads[..., -1, :, None]
    ends = state.document_B
    if documents_BT is not None:
        assert ends is not None, "documents need the state's document"
        documents = _document_chunks(documents_BT, padding, chunk_size)
        before = torch.cat([ends[:, None], documents[:, :-1, -1]], dim=1)
        same = (documents[..., :, None] == documents[..., None, :])[:, None]
        pairs, scores = pairs * same, scores * same
        reads = reads * (documents == before[..., None])[:, None, :, :, None]
        writes = writes * (documents == documents[..., -1:])[:, None, :, :, None]
        keeps = keeps * (documents[..., -1] == before)[:, None, :, None, None]
        ends = documents[:, -1, -1]
    right = torch.cat([v, reads * k], dim=-1) * beta
    solved = torch.linalg.solve_triangular(pairs, right, upper=False, unitriangular=True)
    u, y = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    output, value = _scan(u, y, reads * q, scores, writes * k, keeps, state.value_BHKV)
    output_BTHV = output.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return output_BTHV, DeltaState(value, ends)


def _scan(
    u: Tensor, y: Tensor, q: Tensor, scores: Tensor, k: Tensor, keeps: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Carry the state over the chunks; tensors are ``[B, H, Z, ...]``."""
    outputs = []
    for z in range(u.shape[2]):
        w = u[:, :, z] - y[:, :, z] @ value
        outputs.append(q[:, :, z] @ value + scores[:, :, z] @ w)
        value = keeps[:, :, z] * value + k[:, :, z].transpose(-1, -2) @ w
    return torch.stack(outputs, dim=2), value


def _decayed_products(a: Tensor, b: Tensor, cumulative: Tensor) -> Tensor:
    """``sum_d a_id b_jd exp(G_id - G_jd)`` for j <= i; entries above the diagonal are arbitrary.

    ``cumulative`` is G in fp64. Rows go in tiles: both exponents are taken relative to the tile's
    middle, which keeps every factor inside fp32 however long the chunk.
    """
    size = a.shape[-2]
    rows = []
    for start in range(0, size, _TILE):
        stop = min(start + _TILE, size)
        middle = cumulative[..., (start + stop - 1) // 2, :][..., None, :]
        left = a[..., start:stop, :] * (cumulative[..., start:stop, :] - middle).to(a.dtype).exp()
        right = b[..., :stop, :] * (middle - cumulative[..., :stop, :]).to(b.dtype).exp()
        rows.append(F.pad(left @ right.transpose(-1, -2), (0, size - stop)))
    return torch.cat(rows, dim=-2)


def _chunks(x_BTHX: Tensor, padding: int, chunk_size: int) -> Tensor:
    """``[B, T, H, X]`` to ``[B, H, Z, C, X]``, zero-padded at the end."""
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, padding))
    return padded.unflatten(1, (-1, chunk_size)).permute(0, 3, 1, 2, 4)


def _document_chunks(documents_BT: Tensor, padding: int, chunk_size: int) -> Tensor:
    """``[B, T]`` to ``[B, Z, C]``; padded tokens go on with the last document."""
    tail = documents_BT[:, -1:].expand(-1, padding)
    return torch.cat([documents_BT, tail], dim=1).unflatten(1, (-1, chunk_size))
