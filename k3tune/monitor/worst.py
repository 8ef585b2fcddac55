"""A step's worst tokens, as the log shows them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from k3tune.monitor.samples import Ints, Samples

COUNT = 8
"""Tokens shown a step."""

_CONTEXT = 12

Decode = Callable[[Sequence[int]], str]


def worst_tokens(samples: Samples, decode: Decode | None = None) -> list[dict[str, Any]]:
    """The tokens with the largest \\|r\\|, the ``tokens`` of the record ``worst``.

    Args:
        samples: one step's; ``token_ids`` give ids and text.
        decode: ids -> text, or None.
    """
    good = samples.finite
    size = np.where(good, np.abs(samples.log_ratio), -1.0)
    order = np.argsort(-size, axis=None, kind="stable")[: min(COUNT, int(good.sum()))]
    return [
        _entry(samples, int(row), int(place), decode)
        for row, place in zip(*np.unravel_index(order, size.shape), strict=True)
    ]


def _entry(samples: Samples, row: int, place: int, decode: Decode | None) -> dict[str, Any]:
    ids = None if samples.token_ids is None else samples.token_ids[row]
    return {
        "sample": row,
        "prompt": int(samples.prompts[row]),
        "position": place,
        "token_id": None if ids is None else int(ids[place]),
        "text": _text(ids, slice(place, place + 1), decode),
        "context": _text(ids, slice(max(0, place - _CONTEXT), place), decode),
        "logp_train": float(samples.train[row, place]),
        "logp_rollout": float(samples.rollout[row, place]),
        "r": float(samples.log_ratio[row, place]),
    }


def _text(ids: Ints | None, part: slice, decode: Decode | None) -> str | None:
    return None if ids is None or decode is None else decode(ids[part].tolist())
