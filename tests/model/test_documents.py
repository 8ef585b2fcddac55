"""Padding and packing change nothing: every document is what it is alone."""

import pytest
import torch

from k3tune.model import load_base, mla
from k3tune.model.cache import DeltaState
from k3tune.model.documents import PADDING, FrontPadding, find_documents

ATOL = 1e-10
LENGTHS = (7, 3, 15, 1, 19)


@pytest.fixture(autouse=True)
def blocks_shorter_than_a_document(monkeypatch):
    monkeypatch.setattr(mla, "_DOCUMENTS_BLOCK", 4)


@pytest.fixture(scope="module")
def model(fixtures):
    return load_base(fixtures / "k3_tiny", dtype=torch.float64)


@pytest.fixture(scope="module")
def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 316, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model, documents) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(ids[None]).logits[0] for ids in documents]


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def boundaries() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def indices() -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]


DESCRIPTIONS = {
    "position_ids": lambda: {"position_ids": positions()},
    "cu_seq_lens": lambda: {
        "cu_seq_lens_q": boundaries(),
        "cu_seq_lens_k": boundaries(),
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    },
    "seq_idx": lambda: {"seq_idx": indices()},
    "all of them": lambda: {
        "position_ids": positions(),
        "cu_seq_lens_q": boundaries(),
        "seq_idx": indices(),
    },
}


@torch.no_grad()
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_a_packed_row_equals_its_documents_alone(model, documents, alone, description):
    logits = model(torch.cat(documents)[None], **DESCRIPTIONS[description]()).logits[0]
    for actual, expected in zip(logits.split(LENGTHS), alone, strict=True):
        assert (actual - expected).abs().max() <= ATOL


@torch.no_grad()
def test_a_batch_of_packed_rows_equals_its_documents_alone(model, documents, alone):
    rows = torch.stack([torch.cat(documents), torch.cat(documents[::-1])])
    second = torch.cat([torch.arange(length) for length in LENGTHS[::-1]])[None]
    logits = model(rows, position_ids=torch.cat([positions(), second])).logits
    for actual, expected in zip(logits[1].split(LENGTHS[::-1]), alone[::-1], strict=True):
        assert (actual - expected).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_batch_equals_the_single_rows(model, documents, alone, side):
    width = max(LENGTHS) + 4
    ids = torch.full((len(LENGTHS), width), 319)
    mask = torch.zeros_like(ids)
    begin = {"left": lambda n: width - n, "right": lambda n: 0, "both": lambda n: (width - n) // 2}
    for row, document in enumerate(documents):
        at = begin[side](len(document))
        ids[row, at : at + len(document)] = document
        mask[row, at : at + len(document)] = 1
    output = model(ids, attention_mask=mask, output_routing=True)
    for row, expected in enumerate(alone):
        assert (output.logits[row][mask[row] == 1] - expected).abs().max() <= ATOL
    again = model(ids, attention_mask=mask, routing=output.routing)
    assert torch.equal(again.logits[mask == 1], output.logits[mask == 1])


@torch.no_grad()
def test_a_hole_in_the_mask_is_as_if_the_token_were_not_there(model, documents, alone):
    whole = documents[2]
    ids = torch.cat([whole[:6], torch.tensor([9, 9]), whole[6:]])[None]
    mask = torch.ones_like(ids)
    mask[0, 6:8] = 0
    logits = model(ids, attention_mask=mask).logits[0][mask[0] == 1]
    assert (logits - alone[2]).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_decodes_like_the_single_rows(model, documents, alone, side):
    ids, mask = torch.full((2, 15), 319), torch.zeros(2, 15, dtype=torch.long)
    prompts = (documents[2][:12], documents[4][:9])
    for row, prompt in enumerate(prompts):
        at = 15 - len(prompt) if side == "left" else 0
        ids[row, at : at + len(prompt)] = prompt
        mask[row, at : at + len(prompt)] = 1
    output = model(ids, attention_mask=mask, use_cache=True)
    for step in range(3):
        new = torch.stack([documents[2][12 + step], documents[4][9 + step]])[:, None]
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        output = model(new, attention_mask=mask, past_key_values=output.past_key_values)
        for row, (document, start) in enumerate(((2, 12), (4, 9))):
            expected = alone[document][start + step]
            assert (output.logits[row, 0] - expected).abs().max() <= ATOL


@torch.no_grad()
def test_a_packed_prompt_goes_on_with_its_last_document(model, documents, alone):
    row = torch.cat([documents[0], documents[2][:10]])[None]
    position_ids = torch.cat([torch.arange(7), torch.arange(10)])[None]
    output = model(row, position_ids=position_ids, use_cache=True)
    rest = documents[2][10:][None]
    logits = model(rest, past_key_values=output.past_key_values).logits[0]
    assert (logits - alone[2][10:]).abs().max() <= ATOL


@torch.no_grad()
def test_the_loss_has_no_target_across_documents_or_at_padding(model, documents):
    row = torch.cat(documents)[None]
    packed = model(row, labels=row, position_ids=positions()).loss
    targets = sum(length - 1 for length in LENGTHS)
    single = sum(
        model(ids[None], labels=ids[None]).loss * (len(ids) - 1)
        for ids in documents
        if len(ids) > 1
    )
    assert (packed - single / targets).abs() <= ATOL
    padded = torch.nn.functional.pad(documents[2][None], (4, 3), value=319)
    mask = torch.nn.functional.pad(torch.ones(1, 15, dtype=torch.long), (4, 3))
    alone_loss = model(documents[2][None], labels=documents[2][None]).loss
    assert (model(padded, attention_mask=mask, labels=padded).loss - alone_loss).abs() <= ATOL


def test_descriptions_with_the_wrong_shape_are_named():
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 3\), expected \(1, 4\)"):
        find_documents((1, 4), torch.device("cpu"), position_ids=torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("bounds", "options", "sentence"),
    [
        ([0, 12, 9, 20], {}, "expected ascending integers from 0 to 20"),
        ([0, -3, 20], {}, "expected ascending integers from 0 to 20"),
        ([0, 9], {}, "from 0 to 20"),
        ([0, 9, 25], {}, "from 0 to 20"),
        ([3, 20], {}, "from 0 to 20"),
        ([0.0, 20.0], {}, "from 0 to 20"),
        ([0, 11, 20], {"max_length": 3}, "max_length is 3, .* a document of 11 tokens"),
    ],
)
def test_cumulative_lengths_that_do_not_fit_are_refused(bounds, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_documents((1, 20), torch.device("cpu"), cu_seq_lens=torch.tensor(bounds), **options)


@torch.no_grad()
def test_a_mask_that_contradicts_the_cache_is_refused(model, documents):
    ids = documents[2][None]
    cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, :5] = 0
    with pytest.raises(ValueError, match=r"counts \[10\] cached tokens a row, the cache holds"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_a_left_padded_row_is_not_moved():
    front = FrontPadding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert torch.equal(front.order_BT, torch.arange(4).expand(2, -1))


def test_cumulative_lengths_for_varlen_kernels_split_rows_and_documents():
    documents = find_documents(
        (2, 4), torch.device("cpu"), position_ids=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    )
    assert documents.cu_seq_lens.tolist() == [0, 2, 4, 8]


def test_keys_are_read_from_the_first_document_any_row_is_in():
    cpu = torch.device("cpu")
    padded = find_documents((2, 4), cpu, attention_mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]))
    assert padded.first_keys == [0, 0, 1, 1]
    # a document goes on behind padding
    more = find_documents(
        (2, 3), cpu, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), cached=padded
    )
    assert more.first_keys == [1, 1, 1]
    packed = find_documents((1, 6), cpu, position_ids=torch.tensor([[0, 1, 0, 1, 2, 0]]))
    assert packed.first_keys == [0, 0, 2, 2, 2, 5]


def test_a_delta_state_enters_its_own_document_only():
    value = torch.ones(3, 1, 2, 2)
    ids = torch.tensor([[4, 4], [5, 5], [PADDING, 4]])
    entering = DeltaState(value, torch.tensor([4, 4, 4])).entering(ids)
    assert entering.flatten(1).any(1).tolist() == [True, False, False]
    # rows that were one document are document 0
    assert torch.equal(DeltaState(value).entering(ids * 0), value)
    assert torch.equal(DeltaState(value).entering(None), value)
