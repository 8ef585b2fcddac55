"""Prompts from files: rendered up to the answer, other columns kept, bad ones counted."""

import json
import logging

import pytest
from tiny_grpo import make_grpo

from k3tune.arguments import PromptArguments
from k3tune.data import K3Tokenizer, render_chat
from k3tune.data.errors import DataError
from k3tune.rl.prompts import SAMPLE, build_prompts, load_prompts
from k3tune.run_log import read_run_log

CHAT = [{"role": "user", "content": "1+1"}]
ROWS = [
    {"prompt": CHAT, "answer": "2", "metadata": {"terms": 2}},
    {"prompt": "one and one is", "answer": "two", "hint": [1, None]},
]
BAD = [
    ({"answer": "2"}, "prompt is None, expected a text or a list of messages"),
    ({"prompt": [], "answer": "2"}, "prompt is [], expected a text or a list of messages"),
    ({"prompt": [{"role": "user"}]}, "content"),
    ({"prompt": "x" * 90}, "the prompt has 90 tokens, expected at most 80"),
]


@pytest.fixture(scope="module")
def tokenizer(base_folder):
    return K3Tokenizer.from_pretrained(base_folder)


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def options(path, **more):
    return PromptArguments(path, thinking_effort="none", max_prompt_length=80, **more)


def test_prompts_end_where_the_answer_begins(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", ROWS)
    dataset = load_prompts(path, options(path), tokenizer)
    expected = render_chat(CHAT, tokenizer, thinking_effort=None, add_generation_prompt=True)
    assert dataset[0]["input_ids"] == expected.input_ids
    assert dataset[1]["input_ids"] == tokenizer.encode_text("one and one is")
    assert dataset["sample_id"] == [1, 2]
    # as they stand in the file: rows with other keys and nulls too
    assert [json.loads(row) for row in dataset[SAMPLE]] == ROWS


def test_effort_and_mode_are_rendered(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", ROWS[:1])
    plain = load_prompts(path, options(path, thinking=False), tokenizer)
    expected = render_chat(CHAT, tokenizer, thinking=False, add_generation_prompt=True)
    assert plain[0]["input_ids"] == expected.input_ids
    low = PromptArguments(path, thinking_effort="low")
    longer = load_prompts(path, low, tokenizer)
    assert len(longer[0]["input_ids"]) > len(plain[0]["input_ids"])


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_prompt_is_named_by_its_line(tmp_path, tokenizer, row, message):
    path = write(tmp_path / "p.jsonl", [*ROWS, row])
    with pytest.raises(DataError) as error:
        load_prompts(path, options(path, on_bad_sample="error"), tokenizer)
    assert f"{path} line 3: " in str(error.value) and message in str(error.value)


def test_or_left_out_and_counted(tmp_path, tokenizer, caplog):
    path = write(tmp_path / "p.jsonl", [*ROWS, *(row for row, _ in BAD)])
    with caplog.at_level(logging.WARNING, "k3tune"):
        dataset = load_prompts(path, options(path), tokenizer)
    assert dataset["sample_id"] == [1, 2]
    assert "2 of 6 prompts kept; left out: " in caplog.text and "2 unknown form" in caplog.text


def test_an_empty_source_is_refused(tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"empty.jsonl holds no prompt, expected at least one"):
        load_prompts(str(tmp_path / "empty.jsonl"), PromptArguments(str(tmp_path)), tokenizer)


def test_a_source_without_a_usable_prompt_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [BAD[0][0]])
    with pytest.raises(DataError, match="0 of 1 prompts kept"):
        load_prompts(path, options(path), tokenizer)


def test_evaluation_prompts_come_from_their_own_file(tmp_path, tokenizer):
    train, held_out = (write(tmp_path / name, ROWS) for name in ("train.jsonl", "eval.jsonl"))
    assert build_prompts(options(train), tokenizer)[1] is None
    _, found = build_prompts(options(train, eval_path=held_out), tokenizer)
    assert found["sample_id"] == [1, 2]


def test_rewards_get_every_column_and_what_was_said(base_folder, tmp_path):
    rows = [*ROWS, {"prompt": CHAT, "images": None}, {"prompt": "text", "answer": "3"}]
    write(tmp_path / "p.jsonl", rows)
    seen = {}

    def reward(completions, replies, answer, metadata, hint, sample_id, prompts, **others):
        for place, number in enumerate(sample_id):
            row = rows[number - 1]
            columns = (answer[place], metadata[place], hint[place], prompts[place])
            assert columns == tuple(
                row.get(name) for name in ("answer", "metadata", "hint", "prompt")
            )
            chat = isinstance(row["prompt"], list)
            assert (replies[place] is not None) == chat
            assert isinstance(completions[place], list if chat else str)
            if chat:
                assert completions[place][0]["content"] == replies[place].content
            seen[number] = True
        assert {"trainer_state", "log_metric", "log_extra"} <= others.keys()
        assert not {"images", "input_ids", SAMPLE} & others.keys()
        return [float(place) for place in range(len(completions))]

    make_grpo(
        base_folder,
        tmp_path / "p.jsonl",
        tmp_path / "run",
        rewards=[reward],
        per_device_train_batch_size=8,
        max_steps=1,
    ).train()
    assert set(seen) == {1, 2, 3, 4}
    assert read_run_log(tmp_path / "run").of_kind("train")[0]["reward"] == 3.5
