"""Log-probabilities of given token ids, row by row, without the logits of more than a chunk.

Shape letters: ``B`` rows of a batch, ``T`` tokens of its longest row, ``D`` model width.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k3tune.errors import K3TuneError
from k3tune.model.modeling import K3ForCausalLM

_NO_TARGET = -100


@torch.no_grad()
def score_rows(
    model: K3ForCausalLM,
    rows: Sequence[Sequence[int]],
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda num_rows: None,
) -> list[list[float | None]]:
    """Return ``log p(token | tokens before it)`` for every token of every row.

    Rows run from the longest to the shortest, ``batch_size`` at a time, so that little is padded
    and a batch that does not fit fails first. They are padded on the right: K3 is causal, so no
    token of a row sees its padding.

    Args:
        model: the model, on any device.
        rows: token ids, each inside the vocabulary.
        batch_size: rows that run together.
        progress: called with the number of rows a batch has finished.

    Returns:
        A list a row, in the order given and as long as the row; its first entry is None, for
        nothing precedes that token.

    Raises:
        K3TuneError: naming row and position (from 1 and 0), if a log-probability is not finite.
    """
    scores: list[list[float | None]] = [[None] * min(len(row), 1) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        # sorted by length: if the first row predicts nothing, none does
        if len(rows[batch[0]]) > 1:
            losses_BT = _batch_losses(model, [rows[index] for index in batch]).tolist()
            for index, losses_T in zip(batch, losses_BT, strict=True):
                scores[index] += _negated(losses_T[: max(len(rows[index]) - 1, 0)], index)
        progress(len(batch))
    return scores


def _batch_losses(model: K3ForCausalLM, rows: list[Sequence[int]]) -> Tensor:
    """Negative log-likelihoods ``[B, T - 1]`` fp32; entry t belongs to token t + 1."""
    ids_BT = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
    targets_BT = torch.full_like(ids_BT, _NO_TARGET)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row)] = targets_BT[number, : len(row)] = torch.tensor(row)
    ids_BT, targets_BT = ids_BT.to(model.device), targets_BT.to(model.device)
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    return model.token_losses(hidden_BTD, targets_BT[:, 1:].contiguous())


def _negated(losses: list[float], index: int) -> list[float]:
    for position, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise K3TuneError(
                f"the log-probability of row {index + 1} at position {position} is {-loss}, "
                "expected a finite number: the base's weights or the chosen dtype overflow"
            )
    # 0 - x, so that a certain token scores 0.0 and not -0.0
    return [0.0 - loss for loss in losses]
