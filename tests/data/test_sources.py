"""Sources: three forms of samples, many formats of files, and an account of every bad sample."""

import json

import pytest
from datasets import Dataset, DatasetDict

from k3tune.data import render_chat
from k3tune.data.errors import DataError, Problem
from k3tune.data.sources import SampleOptions, encode_sample, load_samples
from k3tune.errors import ConfigError

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Yes."}
OPTIONS = SampleOptions(max_length=200, thinking_effort=None)
GOOD = [
    {"messages": [USER, ANSWER]},
    {"prompt": "Hello", "completion": " world"},
    {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
    {"text": "Hello world"},
]


def calling(arguments) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


BAD = {
    "{'text': 'x'}": (Problem.INVALID_JSON, "no JSON"),
    "[1]": (Problem.INVALID_JSON, "a JSON list"),
    '{"txt": "x"}': (Problem.UNKNOWN_FORM, "none of messages, prompt, completion, text"),
    '{"prompt": "x"}': (Problem.UNKNOWN_FORM, "has prompt, expected"),
    '{"text": "x", "messages": []}': (Problem.UNKNOWN_FORM, "has messages, text, expected"),
    '{"text": 3}': (Problem.INVALID_MESSAGE, "the text is a int"),
    '{"prompt": "x", "completion": []}': (Problem.INVALID_MESSAGE, "the text is a list"),
    '{"prompt": [], "completion": "x"}': (Problem.INVALID_MESSAGE, "completion a str"),
    '{"messages": []}': (Problem.INVALID_MESSAGE, "messages is an empty list"),
    '{"messages": [{"role": "user"}]}': (Problem.INVALID_MESSAGE, "message 1 .user. has no"),
    json.dumps({"messages": [ANSWER]}): (Problem.ROLE_ORDER, "comes before any user"),
    json.dumps({"messages": [USER]}): (Problem.NOTHING_TRAINED, "no token that is trained"),
    '{"text": ""}': (Problem.NOTHING_TRAINED, "no token that is trained"),
    json.dumps({"text": "x" * 200}): (Problem.TOO_LONG, "has 201 tokens, expected at most 200"),
    json.dumps({"messages": [USER, calling("{bad")]}): (Problem.INVALID_TOOL_JSON, "1 tool calls"),
    json.dumps({"messages": [USER, calling([1])]}): (Problem.INVALID_TOOL_JSON, "are a list"),
    json.dumps({"messages": [USER, ANSWER], "tools": "[{"}): (
        Problem.INVALID_TOOL_JSON,
        "tools is no JSON",
    ),
    json.dumps({"messages": [USER, ANSWER], "tools": [{}]}): (
        Problem.INVALID_TOOL_JSON,
        "tool 1 has no name",
    ),
}


def write_lines(path, lines) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def trained_text(tokenizer, ids, labels) -> str:
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
    return tokenizer.decode([label for label in labels if label != -100])


def test_messages_train_the_assistants_part(tokenizer):
    ids, labels = encode_sample(GOOD[0], tokenizer, OPTIONS)
    assert ids == render_chat([USER, ANSWER], tokenizer, thinking_effort=None).input_ids
    assert trained_text(tokenizer, ids, labels) == (
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response"
        "<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


def test_a_completion_is_trained_and_its_prompt_is_not(tokenizer):
    ids, labels = encode_sample(GOOD[1], tokenizer, OPTIONS)
    assert ids[:-1] == tokenizer.encode_text("Hello") + tokenizer.encode_text(" world")
    assert trained_text(tokenizer, ids, labels) == " world[EOS]"


def test_of_messages_split_in_prompt_and_completion_the_completion_is_trained(tokenizer):
    ids, labels = encode_sample(GOOD[2], tokenizer, OPTIONS)
    whole = render_chat([USER, ANSWER, USER, ANSWER], tokenizer, thinking_effort=None)
    assert ids == whole.input_ids
    last = len(ids) - len(render_chat([USER, ANSWER], tokenizer, thinking_effort=None).input_ids)
    assert all(label == -100 for label in labels[:last])
    assert labels[last:] == whole.labels[last:]


def test_text_is_trained_up_to_its_end(tokenizer):
    ids, labels = encode_sample(GOOD[3], tokenizer, OPTIONS)
    assert labels == ids
    assert tokenizer.decode(ids) == "Hello world[EOS]"


def test_chat_options_reach_the_encoder(tokenizer):
    options = SampleOptions(max_length=900, thinking_effort="low", train_opening_tag=False)
    ids, labels = encode_sample(GOOD[0], tokenizer, options)
    assert "thinking_effort=low" in tokenizer.decode(ids)
    assert trained_text(tokenizer, ids, labels).startswith("<|close|>think")
    options = SampleOptions(max_length=900, thinking=False)
    assert "think" not in tokenizer.decode(encode_sample(GOOD[0], tokenizer, options)[0])


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]'], ids=["list", "text"])
def test_tools_are_declared(tokenizer, tools):
    ids, _ = encode_sample({"messages": [USER, ANSWER], "tools": tools}, tokenizer, OPTIONS)
    assert '```json\n[{"name":"add"}]\n```' in tokenizer.decode(ids)


def test_jsonl_keeps_its_line_numbers(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["", *map(json.dumps, GOOD)])
    samples = load_samples(path, tokenizer, OPTIONS)
    assert samples.dataset.column_names == ["input_ids", "labels", "sample_id"]
    assert list(samples.dataset["sample_id"]) == [2, 3, 4, 5]
    for row, sample in zip(samples.dataset, GOOD, strict=True):
        assert (row["input_ids"], row["labels"]) == encode_sample(sample, tokenizer, OPTIONS)
    report = samples.report
    assert (report.num_samples, report.num_kept) == (4, 4)
    assert report.num_tokens == sum(map(len, samples.dataset["input_ids"]))
    assert report.num_trained_tokens == sum(
        label != -100 for labels in samples.dataset["labels"] for label in labels[1:]
    )


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_sample_is_skipped_counted_and_named_by_its_line(tokenizer, tmp_path, line):
    problem, detail = BAD[line]
    path = write_lines(tmp_path / "a.jsonl", [json.dumps(GOOD[3]), "", line])
    samples = load_samples(path, tokenizer, OPTIONS)
    assert list(samples.dataset["sample_id"]) == [1]
    assert samples.report.num_samples == 2
    [(found, bad)] = samples.report.bad.items()
    assert (found, bad.count) == (problem, 1)
    with pytest.raises(DataError, match=f"a.jsonl line 3: .*{detail}"):
        raise DataError(bad.first[0])


def test_bad_samples_are_refused_all_at_once_where_configured(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [json.dumps(GOOD[0]), *BAD])
    strict = SampleOptions(max_length=200, thinking_effort=None, on_bad_sample="error")
    with pytest.raises(DataError) as caught:
        load_samples(path, tokenizer, strict)
    text = str(caught.value)
    assert text.startswith(f"{path}: 1 of {len(BAD) + 1} samples kept, ")
    assert "4 samples left out, invalid tool JSON:" in text
    assert text.count(f"{path} line ") == 3 + 3 + 2 + 3 + 1 + 2 + 1


def test_examples_are_few_and_counts_are_whole(tokenizer, tmp_path):
    lines = [json.dumps(GOOD[0])] + ["{"] * 50
    report = load_samples(write_lines(tmp_path / "a.jsonl", lines), tokenizer, OPTIONS).report
    assert report.bad[Problem.INVALID_JSON].count == 50
    assert [place.split(":")[0][-6:] for place in report.bad[Problem.INVALID_JSON].first] == [
        "line 2",
        "line 3",
        "line 4",
    ]


@pytest.mark.parametrize("lines", [[], ["{"]], ids=["empty", "all bad"])
def test_a_source_without_any_good_sample_is_refused(tokenizer, tmp_path, lines):
    with pytest.raises(DataError, match=r"a\.jsonl"):
        load_samples(write_lines(tmp_path / "a.jsonl", lines), tokenizer, OPTIONS)


def test_columns_that_are_not_used_are_reported(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [json.dumps({**GOOD[0], "tool": [], "id": 3})])
    report = load_samples(path, tokenizer, OPTIONS).report
    assert report.ignored_columns == ("id", "tool")
    assert "columns not used: id, tool" in str(report)


def test_bytes_that_are_no_text_are_a_bad_sample(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "fine"}\n')
    report = load_samples(str(tmp_path / "a.jsonl"), tokenizer, OPTIONS).report
    assert report.bad[Problem.INVALID_JSON].count == 1


def test_a_json_file_may_be_a_list_or_lines(tokenizer, tmp_path):
    lines = load_samples(
        write_lines(tmp_path / "lines.json", map(json.dumps, GOOD)), tokenizer, OPTIONS
    )
    (tmp_path / "list.json").write_text(json.dumps([*GOOD, 3], indent=1))
    listed = load_samples(str(tmp_path / "list.json"), tokenizer, OPTIONS)
    assert listed.dataset.to_list() == [
        {**row, "sample_id": index} for index, row in enumerate(lines.dataset, start=1)
    ]
    assert "list.json item 5: a JSON int" in listed.report.bad[Problem.INVALID_JSON].first[0]


@pytest.mark.parametrize("form", ["parquet", "csv", "folder", "splits"])
def test_column_formats(tokenizer, tmp_path, form):
    rows = Dataset.from_list([{"text": "Hello world"}, {"text": "Hello"}])
    path = tmp_path / f"a.{form}"
    match form:
        case "parquet":
            rows.to_parquet(path)
        case "csv":
            rows.to_csv(path)
        case "folder":
            rows.save_to_disk(path)
        case "splits":
            DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(path)
    samples = load_samples(str(path), tokenizer, OPTIONS)
    assert list(samples.dataset["sample_id"]) == [1, 2]
    assert [tokenizer.decode(ids) for ids in samples.dataset["input_ids"]] == [
        "Hello world[EOS]",
        "Hello[EOS]",
    ]
    if form == "splits":
        assert len(load_samples(str(path), tokenizer, OPTIONS, split="test").dataset) == 1


def test_nulls_that_a_column_format_may_have_put_for_missing_keys_are_refused(tokenizer, tmp_path):
    chats = [[USER, calling({"a": 1})], [USER, calling({"b": 1})], [USER, {**ANSWER, "name": "A"}]]
    Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(tmp_path / "a.parquet")
    samples = load_samples(str(tmp_path / "a.parquet"), tokenizer, OPTIONS)
    assert list(samples.dataset["sample_id"]) == [3]
    assert samples.report.bad[Problem.INVALID_TOOL_JSON].count == 2
    chats = [[USER, calling('{"a": 1}')], [USER, calling('{"b": null}')]]
    Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(tmp_path / "b.parquet")
    assert load_samples(str(tmp_path / "b.parquet"), tokenizer, OPTIONS).report.num_kept == 2


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "no/such-dataset"])
def test_a_source_that_cannot_be_read_is_named(tokenizer, name):
    with pytest.raises(DataError, match=f"cannot read {name} .split train.: .*expected a .jsonl"):
        load_samples(name, tokenizer, OPTIONS)


def test_workers_tokenise_alike(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [*map(json.dumps, GOOD), *BAD] * 3)
    alone, shared = (
        load_samples(
            path, tokenizer, SampleOptions(max_length=200, thinking_effort=None, num_proc=workers)
        )
        for workers in (None, 2)
    )
    assert alone.dataset.to_list() == shared.dataset.to_list()
    assert alone.report == shared.report


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 1},
        {"max_length": 8.0},
        {"max_length": 8, "on_bad_sample": "drop"},
        {"max_length": 8, "thinking_effort": "medium"},
    ],
)
def test_options_that_are_not_valid(options):
    with pytest.raises(ConfigError, match=list(options)[-1]):
        SampleOptions(**options)
