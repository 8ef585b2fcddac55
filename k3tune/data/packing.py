"""Rows of several documents each, so that little of a batch is padding.

Position ids restart at 0 with every document, where the model resets its states, convolutions and
attention: a document in a row gives what it gives alone.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from k3tune.data.chat import NO_TARGET
from k3tune.data.errors import DataError, Problem
from k3tune.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

Strategy = Literal["best_fit", "in_order"]


@dataclass(frozen=True)
class Packed:
    """Packed rows and their counts.

    Attributes:
        rows: a row holds ``input_ids``, ``labels`` (-100 at the first token of each document,
            which nothing before it predicts), ``position_ids``, ``seq_lengths`` (of its documents,
            as TRL's collator reads them) and ``sample_ids``.
        num_documents, num_tokens: of all rows together.
        max_length: tokens a row may hold.
    """

    rows: "Dataset"
    num_documents: int
    num_tokens: int
    max_length: int

    @property
    def fill(self) -> float:
        """Fraction of the rows' places that hold a token."""
        return self.num_tokens / (len(self.rows) * self.max_length)


def pack(
    samples: "Dataset | Sequence[Mapping[str, Any]]",
    max_length: int,
    *,
    seed: int,
    strategy: Strategy = "best_fit",
) -> Packed:
    """Put whole samples together into rows of at most ``max_length`` tokens.

    ``best_fit`` takes samples from the longest to the shortest, each to the fullest row that has
    room, and then shuffles the documents of a row and the rows: left as they are, long documents
    would stand at the starts of rows and early in training. ``in_order`` keeps the order of the
    samples, and begins a row when the next one does not fit; the seed then changes nothing.

    Args:
        samples: each with ``input_ids`` and ``labels`` of one length, and with ``sample_id`` or
            none of them; without, a sample's index is its id.
        max_length: longest row, in tokens.
        seed: of the shuffling.
        strategy: see above.

    Raises:
        DataError: if there is no sample, or naming one that is empty or longer than a row.
        ConfigError: if the strategy is not one of the two.
    """
    if strategy not in ("best_fit", "in_order"):
        raise ConfigError(f"strategy is {strategy!r}, expected best_fit or in_order")
    lengths = [len(sample["input_ids"]) for sample in samples]
    _check_lengths(lengths, max_length)
    if strategy == "best_fit":
        members = _best_fit(lengths, max_length, Random(seed))
    else:
        members = _in_order(lengths, max_length)
    return Packed(_build(samples, members), len(lengths), sum(lengths), max_length)


def _check_lengths(lengths: list[int], max_length: int) -> None:
    if not lengths:
        raise DataError("there is no sample to pack, expected at least one")
    for index, length in enumerate(lengths):
        if not 0 < length <= max_length:
            raise DataError(
                f"sample {index} has {length} tokens, expected 1 to {max_length}: drop it, or pack "
                "to longer rows",
                Problem.TOO_LONG if length else Problem.NOTHING_TRAINED,
            )


def _best_fit(lengths: list[int], max_length: int, random: Random) -> list[list[int]]:
    order = list(range(len(lengths)))
    random.shuffle(order)
    order.sort(key=lambda index: lengths[index], reverse=True)
    rows: list[list[int]] = []
    # free places, ascending, and the rows that have exactly so many
    spaces: list[int] = []
    rows_by_space: dict[int, list[list[int]]] = {}
    for index in order:
        at = bisect_left(spaces, lengths[index])
        if at == len(spaces):
            row: list[int] = []
            rows.append(row)
            space = max_length
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[at], rows_by_space[space]
        row.append(index)
        left = space - lengths[index]
        if left not in rows_by_space:
            insort(spaces, left)
        rows_by_space.setdefault(left, []).append(row)
    for row in rows:
        random.shuffle(row)
    random.shuffle(rows)
    return rows


def _in_order(lengths: list[int], max_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    space = 0
    for index, length in enumerate(lengths):
        if length > space:
            rows.append([])
            space = max_length
        rows[-1].append(index)
        space -= length
    return rows


def _build(samples: Any, members: list[list[int]]) -> "Dataset":
    from datasets import Dataset, Features, List, Value
    from datasets.fingerprint import generate_random_fingerprint

    ids = List(Value("int32"))
    columns = dict.fromkeys(("input_ids", "labels", "position_ids", "seq_lengths"), ids)
    plan = Dataset.from_dict({"members": members})
    return plan.map(
        _row,
        fn_kwargs={"samples": samples},
        remove_columns=plan.column_names,
        features=Features({**columns, "sample_ids": List(Value("int64"))}),
        # the samples would be hashed for a cache that rows in memory do not have
        new_fingerprint=generate_random_fingerprint(),
        desc="Packing",
    )


def _row(plan: Mapping[str, list[int]], samples: Any) -> dict[str, list[int]]:
    row: dict[str, list[int]] = {
        "input_ids": [],
        "labels": [],
        "position_ids": [],
        "seq_lengths": [],
        "sample_ids": [],
    }
    for index in plan["members"]:
        sample = samples[index]
        length = len(sample["input_ids"])
        row["input_ids"] += sample["input_ids"]
        row["labels"] += [NO_TARGET, *sample["labels"][1:]]
        row["position_ids"] += range(length)
        row["seq_lengths"].append(length)
        row["sample_ids"].append(sample.get("sample_id", index))
    return row
