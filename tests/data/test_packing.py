"""Packed rows: every sample whole and once, few places empty, nothing leaks between documents."""

import random

import pytest
import torch

from k3tune.data import pack
from k3tune.data.errors import DataError
from k3tune.errors import ConfigError
from k3tune.model import load_base


def samples(lengths, seed=0) -> list[dict]:
    source = random.Random(seed)
    rows = []
    for length in lengths:
        ids = [source.randrange(200) for _ in range(length)]
        labels = [token if source.random() < 0.6 else -100 for token in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


LENGTHS = random.Random(1).choices(range(1, 65), k=300)


def documents(packed) -> dict[int, tuple]:
    """Sample id -> its ids and labels, cut out of the rows."""
    found = {}
    for row in packed.rows:
        start = 0
        for sample_id, length in zip(row["sample_ids"], row["seq_lengths"], strict=True):
            cut = slice(start, start + length)
            assert sample_id not in found
            assert row["position_ids"][cut] == list(range(length))
            found[sample_id] = (row["input_ids"][cut], row["labels"][cut])
            start += length
        assert start == len(row["input_ids"]) <= packed.max_length
    return found


@pytest.mark.parametrize("strategy", ["best_fit", "in_order"])
def test_every_sample_is_in_one_row_whole(strategy):
    given = samples(LENGTHS)
    packed = pack(given, 64, seed=0, strategy=strategy)
    found = documents(packed)
    assert sorted(found) == list(range(len(given)))
    for index, sample in enumerate(given):
        ids, labels = found[index]
        assert ids == sample["input_ids"]
        assert labels == [-100, *sample["labels"][1:]]
    assert (packed.num_documents, packed.num_tokens) == (len(LENGTHS), sum(LENGTHS))


def test_best_fit_leaves_few_places_empty():
    best, plain = (
        pack(samples(LENGTHS), 64, seed=0, strategy=name) for name in ("best_fit", "in_order")
    )
    assert best.fill > 0.97 > plain.fill
    assert len(best.rows) < len(plain.rows)


def test_best_fit_puts_long_documents_anywhere_in_a_row_and_anywhere_in_training():
    lengths = [40, 20] * 200
    rows = list(pack(samples(lengths), 64, seed=0).rows)
    first = [row["seq_lengths"][0] for row in rows]
    assert len(rows) == 200
    assert 70 < first.count(40) < 130
    early = [id for row in rows[:100] for id in row["sample_ids"] if id < 200]
    assert 70 < len(early) < 130


def test_the_order_is_kept_in_order():
    rows = pack(samples([30, 30, 10, 60, 5]), 64, seed=0, strategy="in_order").rows
    assert list(rows["sample_ids"]) == [[0, 1], [2], [3], [4]]


def test_a_seed_gives_the_same_rows_and_another_seed_others():
    one, same, other = (pack(samples(LENGTHS), 64, seed=seed).rows.to_list() for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_sample_ids_are_those_of_the_samples():
    given = [{**sample, "sample_id": 100 + i} for i, sample in enumerate(samples([3, 4]))]
    [ids] = pack(given, 8, seed=0).rows["sample_ids"]
    assert sorted(ids) == [100, 101]


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [([], "no sample"), ([3, 9], "sample 1 has 9 tokens"), ([0], "sample 0 has 0 tokens")],
)
def test_samples_that_do_not_fit_a_row(lengths, sentence):
    with pytest.raises(DataError, match=sentence):
        pack(samples(lengths), 8, seed=0)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="'wrapped', expected best_fit or in_order"):
        pack(samples([3]), 8, seed=0, strategy="wrapped")


def summed_loss(model, row, **positions) -> tuple[torch.Tensor, int]:
    labels = torch.tensor([row["labels"]])
    count = int((labels[:, 1:] != -100).sum())
    output = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels, **positions)
    return output.loss * count, count


@torch.no_grad()
@pytest.mark.parametrize("base", ["k3_tiny", "k3_tiny_shared_outer"])
def test_packed_rows_have_the_loss_of_their_samples_alone(fixtures, base):
    model = load_base(fixtures / base, dtype=torch.float64)
    given = [sample for sample in samples([7, 12, 3, 25, 2, 18, 9]) if len(sample["labels"]) > 1]
    for sample in given:
        sample["labels"][-1] = sample["input_ids"][-1]
    alone = [summed_loss(model, sample) for sample in given]
    rows = pack(given, 32, seed=0).rows
    packed = [
        summed_loss(model, row, position_ids=torch.tensor([row["position_ids"]])) for row in rows
    ]
    assert len(rows) < len(given)
    assert sum(count for _, count in packed) == sum(count for _, count in alone)
    expected = sum(loss for loss, _ in alone)
    assert abs(sum(loss for loss, _ in packed) - expected) <= 1e-10 * expected
