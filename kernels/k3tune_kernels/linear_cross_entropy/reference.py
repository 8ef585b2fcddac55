"""Log-softmax, loss and gradient of a chunk of logits, in place, in plain torch.

Letters: C rows of the chunk, V vocabulary.

For logits z and target t: ``nll = log sum_v exp(z_v) - z_t`` and
``dnll/dz_v = exp(z_v) / sum exp(z) - [v = t]``.
"""

import torch

# rows in fp32 at a time where the logits are 16 bits wide
WORK_ROWS = 64


def cross_entropy_(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    ignore_index: int,
    *,
    with_gradient: bool,
) -> torch.Tensor:
    """The loss of every row; the logits become the gradient of their row's loss.

    Args:
        logits_CV: ``[C, V]``, overwritten.
        targets_C: ``[C]`` integers.
        ignore_index: target of rows whose loss and gradient are zero.
        with_gradient: without it the logits are left in an unspecified state.

    Returns:
        ``[C]`` in fp32 (fp64 for fp64 logits). A target outside ``0..V-1`` makes its row NaN.
    """
    compute = torch.promote_types(logits_CV.dtype, torch.float32)
    vocabulary = logits_CV.shape[1]
    ignored_C = targets_C == ignore_index
    known_C = ignored_C | ((targets_C >= 0) & (targets_C < vocabulary))
    column_C1 = targets_C.masked_fill(ignored_C | ~known_C, 0)[:, None]
    losses = []
    for start in range(0, len(logits_CV), WORK_ROWS):
        rows = slice(start, start + WORK_ROWS)
        z, column = logits_CV[rows].to(compute), column_C1[rows]
        z -= z.amax(1, keepdim=True)
        target_logit = z.gather(1, column)
        total = z.exp_().sum(1, keepdim=True)
        losses.append((total.log() - target_logit).squeeze(1))
        if not with_gradient:
            continue
        z /= total
        z.scatter_add_(1, column, torch.full_like(target_logit, -1))
        z.masked_fill_(~known_C[rows, None], torch.nan).masked_fill_(ignored_C[rows, None], 0)
        logits_CV[rows] = z
    nll_C = torch.cat(losses)
    return nll_C.masked_fill_(~known_C, torch.nan).masked_fill_(ignored_C, 0)
