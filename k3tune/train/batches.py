"""Batches that know which samples they are made of."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SAMPLE_IDS = "sample_ids"
_COLUMNS = ("sample_ids", "sample_id")
_SHOWN = 20


class SampleIdCollator:
    """A collator around TRL's that adds the ids of a batch's samples, int64 ``[samples]``.

    Rows have ``sample_ids`` (packed ones) or ``sample_id``; rows with neither give no ids.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        column = next((name for name in _COLUMNS if name in rows[0]), None)
        if column is not None:
            ids: list[int] = []
            for row in rows:
                ids += row[column] if isinstance(row[column], list) else [row[column]]
            batch[SAMPLE_IDS] = torch.tensor(ids)
        return batch


def describe_samples(ids: Tensor | None) -> str:
    """The samples of a batch, for an error."""
    if ids is None:
        return "of samples without ids"
    shown = [str(number) for number in ids.tolist()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (
        f"of samples {', '.join(shown[:_SHOWN])}{more} (lines, items or rows of the data, from 1)"
    )
