"""The language-model head and its cross-entropy, without ever holding all logits."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.linear_cross_entropy.chunked import LinearCrossEntropy

__all__ = ["linear_cross_entropy"]


def _check(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int,
    chunk_tokens: int,
) -> None:
    if hidden_ND.dim() != 2 or weight_VD.dim() != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"linear_cross_entropy expects hidden [N, D] and weight [V, D], got "
            f"{tuple(hidden_ND.shape)} and {tuple(weight_VD.shape)}"
        )
    if targets_N.shape != hidden_ND.shape[:1] or targets_N.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy expects int64 targets of shape ({len(hidden_ND)},), one for "
            f"each token, got {tuple(targets_N.shape)} {targets_N.dtype}"
        )
    if chunk_tokens < 1:
        raise ValueError(
            f"linear_cross_entropy expects chunk_tokens of at least 1, got {chunk_tokens}"
        )
    # on a GPU reading a target would stop the host: there a bad target makes its loss NaN
    if targets_N.device.type == "cpu":
        vocabulary = len(weight_VD)
        bad_N = ((targets_N < 0) | (targets_N >= vocabulary)) & (targets_N != ignore_index)
        if bad_N.any():
            position = int(bad_N.int().argmax())
            raise ValueError(
                f"linear_cross_entropy expects targets from 0 to {vocabulary - 1}, or "
                f"{ignore_index} to ignore a token, got {int(targets_N[position])} at token "
                f"{position}"
            )


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    chunk_tokens: int = 1024,
    backend: str = "auto",
) -> torch.Tensor:
    """``-log_softmax(hidden @ weight.T)`` at each token's target.

    At most ``chunk_tokens * V`` logits are alive at a time, forward and backward, in the
    weight's dtype; they become their own gradient in place.

    Args:
        hidden_ND: ``[N, D]``, floating; cast to the weight's dtype for the matmul.
        weight_VD: ``[V, D]``, floating.
        targets_N: ``[N]`` int64, in ``0..V-1`` or ``ignore_index``.
        ignore_index: target of tokens that take no part.
        chunk_tokens: tokens whose logits are made at once.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        ``[N]`` in fp32 (fp64 for an fp64 weight): the loss of each token, 0 where ignored.
        Differentiable in hidden and in weight, each only if it requires grad.

    Raises:
        ValueError: if shapes or dtypes do not fit, ``chunk_tokens`` is below 1, the backend
            cannot run here, or, for CPU tensors, a target is out of range. On a GPU such a
            target makes its loss NaN.
    """
    _check(hidden_ND, weight_VD, targets_N, ignore_index, chunk_tokens)
    chosen = dispatch.choose("linear_cross_entropy", backend, weight_VD, hidden_ND, targets_N)
    return LinearCrossEntropy.apply(
        hidden_ND,
        weight_VD,
        targets_N,
        ignore_index,
        chunk_tokens,
        chosen,
        torch.is_grad_enabled(),
    )
