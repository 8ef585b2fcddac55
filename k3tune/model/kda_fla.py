"""KDA on CUDA through flash-linear-attention (the ``gpu`` extra), with fla-core 0.6's interface.

Not measured on a GPU. Shape letters as in :mod:`k3tune.model.kda`.
"""

import importlib.util
from functools import cache

import torch
from torch import Tensor

from k3tune.model.documents import Documents

# Largest head width fla's chunk kernels take.
_MAX_HEAD_DIM = 256


def fla_accepts(q_BTHK: Tensor) -> bool:
    """Whether fla is installed and takes these inputs; otherwise the plain torch form runs."""
    return (
        q_BTHK.is_cuda
        and q_BTHK.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and q_BTHK.shape[-1] <= _MAX_HEAD_DIM
        and _fla_installed()
    )


def kda_fla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor,
    documents: Documents,
    *,
    keep_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule from a zero state.

    Args:
        q_BTHK, k_BTHK, v_BTHK: convolved projections; fla normalises and scales queries and keys.
        log_decay_BTHK, beta_BTH: fp32 gates.
        documents: where the state resets; rows are then joined and split by document.
        keep_state: also return the state after each row.

    Returns:
        ``[B, T, H, K]`` in the dtype of ``v_BTHK``, and the state ``[B, H, K, K]`` fp32 or None.
    """
    from fla.ops.kda import chunk_kda

    inputs = [q_BTHK, k_BTHK, v_BTHK, log_decay_BTHK, beta_BTH]
    cu_seqlens = documents.cu_seq_lens
    if cu_seqlens is not None:
        inputs = [x.flatten(0, 1)[None] for x in inputs]
    q, k, v, g, beta = inputs
    output, state = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        cu_seqlens=cu_seqlens,
    )
    if keep_state and documents.last_of_row_B is not None:
        state = state[documents.last_of_row_B]
    return output.view_as(v_BTHK), state


@cache
def _fla_installed() -> bool:
    return importlib.util.find_spec("fla") is not None
