"""The data files that fine-tuning k3-nano reads."""

import json
import sys

import pytest

import make_nano_data
from k3tune.data.messages import read_conversation
from nano_tasks import stage_of

pytest.importorskip("reasoning_gym", reason="the extra demo is not installed")


def write(monkeypatch, path, *arguments: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["make_nano_data.py", *arguments, "--out", str(path)])
    make_nano_data.main()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sft_chats_are_valid_and_of_their_stage(monkeypatch, tmp_path):
    rows = write(monkeypatch, tmp_path / "sft.jsonl", "sft", "--spell", "60", "--replay", "40")
    spelled = 0
    for row in rows:
        read_conversation(row["messages"])
        question, answer = (message["content"] for message in row["messages"])
        if question.startswith("Spell"):
            spelled += 1
            word = question.split(": ")[2]
            assert answer == word[::-1]
            assert stage_of("spell_backward", word) == "sft"
        else:
            assert stage_of("chain_sum", question.split(": ")[1].removesuffix(" =")) == "sft"
    assert (spelled, len(rows)) == (60, 100)


def test_rl_prompts_are_of_their_stage_and_come_with_answers(monkeypatch, tmp_path):
    rows = write(monkeypatch, tmp_path / "rl.jsonl", "rl", "--count", "50")
    for row in rows:
        read_conversation(row["prompt"], answer_follows=True)
        expression = row["prompt"][0]["content"].split(": ")[1].removesuffix(" =")
        assert stage_of("chain_sum", expression) == "rl"
        assert eval(expression) == int(row["answer"])
    assert len(rows) == 50


def test_the_same_seed_writes_the_same_file(monkeypatch, tmp_path):
    arguments = ("sft", "--spell", "20", "--replay", "20", "--seed")
    one, two, other = (
        write(monkeypatch, tmp_path / f"{place}.jsonl", *arguments, seed)
        for place, seed in enumerate(("3", "3", "4"))
    )
    assert one == two != other


def test_more_words_than_the_stage_has_are_refused():
    with pytest.raises(ValueError, match=r"stage sft has \d+ words, 100000 were asked for"):
        make_nano_data.sft_rows(100_000, 0, seed=0)
