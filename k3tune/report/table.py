"""Numbers of many records, as columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
# Rows of Python objects that wait for their place in a column: bounds the memory of a long log.
_BLOCK = 8192
# What float32 holds; the width of an axis over larger ones leaves the range of floats.
_LARGEST = 3.5e38


class RecordTable:
    """One row a record; a value that is missing, no number, or beyond float32 is NaN.

    Args:
        texts: names of the fields that are kept as text.
        fields: names of the fields that are kept as numbers; None keeps all others.
    """

    def __init__(self, texts: Sequence[str] = (), fields: Sequence[str] | None = None) -> None:
        self._text_names = tuple(texts)
        self._fields = None if fields is None else tuple(fields)
        self._steps: list[int] = []
        self._texts: list[tuple[Any, ...]] = []
        self._waiting: dict[tuple[str, ...], tuple[list[int], list[tuple[Any, ...]]]] = {}
        self._blocks: list[tuple[tuple[str, ...], NDArray[np.int64], Numbers]] = []
        self._cuts: list[tuple[int, int]] = []

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Append a record."""
        if self._text_names:
            self._texts.append(tuple(map(record.get, self._text_names)))
        names = self._fields
        if names is None:
            names, values = tuple(record), tuple(record.values())
        else:
            values = tuple(map(record.get, names))
        if names not in self._waiting:
            self._waiting[names] = ([], [])
        places, rows = self._waiting[names]
        places.append(len(self._steps))
        rows.append(values)
        self._steps.append(step)
        if len(self._steps) % _BLOCK == 0:
            self._settle()

    def drop_after(self, step: int) -> None:
        """Forget the records so far that belong to a later step."""
        self._cuts.append((len(self._steps), step))

    def freeze(self) -> "Columns":
        """The columns of what was added."""
        self._settle()
        steps = np.array(self._steps, dtype=np.int64)
        kept = np.ones(len(steps), dtype=bool)
        for count, step in self._cuts:
            kept[:count] &= steps[:count] <= step
        columns: dict[str, Numbers] = {}
        for names, places, values in self._blocks:
            # a comparison that is false for nan, too
            values[~(np.abs(values) <= _LARGEST)] = np.nan
            for name, column in zip(names, np.ascontiguousarray(values.T), strict=True):
                if name not in columns:
                    columns[name] = np.full(len(steps), np.nan)
                columns[name][places] = column
        texts: dict[str, list[str | None]] = {
            name: [
                row[place] if isinstance(row[place], str) else None
                for row, keep in zip(self._texts, kept, strict=True)
                if keep
            ]
            for place, name in enumerate(self._text_names)
        }
        numbers = {name: column[kept] for name, column in columns.items()}
        return Columns(steps[kept], numbers, texts, int((~kept).sum()))

    def _settle(self) -> None:
        for names, (places, rows) in self._waiting.items():
            try:
                values = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
            # text, a list, or a number beyond the range of a float
            except (ValueError, TypeError, OverflowError):
                values = np.array([[_number(value) for value in row] for row in rows])
            self._blocks.append((names, np.array(places), values))
        self._waiting = {}


class Columns:
    """What a :class:`RecordTable` holds.

    Attributes:
        steps: optimizer step of each record, int64.
        texts: name -> text or None a record.
        num_dropped: records that were forgotten.

    Args:
        numbers: name -> a finite number or NaN a record.
    """

    def __init__(
        self,
        steps: NDArray[np.int64],
        numbers: Mapping[str, Numbers],
        texts: Mapping[str, list[str | None]],
        num_dropped: int,
    ) -> None:
        self.steps = steps
        self.texts = texts
        self.num_dropped = num_dropped
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> Numbers:
        """A column; NaN all along where no record has the field."""
        return self._numbers.get(name, np.full(len(self.steps), np.nan))

    def names(self, prefix: str = "") -> list[str]:
        """Fields that hold at least one number, in the order they came, by prefix."""
        return [
            name
            for name, column in self._numbers.items()
            if name.startswith(prefix) and not np.isnan(column).all()
        ]

    def last(self, name: str) -> float | None:
        """The last number of a field; None if there is none."""
        column = self[name]
        column = column[~np.isnan(column)]
        return float(column[-1]) if len(column) else None


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")
