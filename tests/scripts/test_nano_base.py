"""The committed k3-nano: small, in the published layout, and what its card says it is."""

import re
from pathlib import Path

import pytest
import torch

import k3tune
from evaluate_nano import evaluate
from k3tune.data.chat import render_chat
from k3tune.data.tokenizer import K3Tokenizer
from k3tune.published.architecture import read_config
from nano_corpus import SPECIAL_TOKENS, pieces
from nano_model import nano_config
from nano_tasks import draw_problems, messages

BASE = Path(__file__).parents[2] / "k3tune/assets/k3-nano"


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    return k3tune.load_base(BASE, dtype=torch.float32)


def test_it_is_at_most_ten_megabytes_of_weights_tokenizer_and_card():
    files = [path for path in BASE.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".model", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) <= 10_000_000


def test_config_and_tokenizer_are_what_the_script_writes(tokenizer):
    special = {
        "bos_token_id": tokenizer.control_id("[BOS]"),
        "eos_token_id": tokenizer.control_id("<|end_of_msg|>"),
        "pad_token_id": tokenizer.control_id("[PAD]"),
    }
    assert read_config(BASE) == nano_config(special)
    names = [*SPECIAL_TOKENS]
    assert [tokenizer.convert_ids_to_tokens(384 - 16 + i) for i in range(16)] == names
    assert [tokenizer.decode_bytes([256 + i]) for i in range(112)] == pieces()


def test_every_byte_encodes(tokenizer):
    data = bytes(range(256)) * 2
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_no_expert_is_dead(model, tokenizer):
    counts = {}
    for problem in draw_problems("chain_sum", "evaluation", 64, seed=7):
        chat = render_chat(messages(problem), tokenizer, thinking_effort=None)
        routing = model.model(
            input_ids=torch.tensor([chat.input_ids]), output_routing=True, use_cache=False
        ).routing
        for layer, entry in routing.items():
            ids = entry.expert_ids.flatten()
            counts[layer] = counts.get(layer, 0) + ids.bincount(minlength=32)
    assert sorted(counts) == [1, 2, 3, 4, 5]
    # prompts alone, one task: more uneven than what training balanced
    assert all((count > 0).sum() >= 24 for count in counts.values())


@pytest.mark.slow
def test_it_neither_fails_nor_solves_the_task_that_reinforcement_learning_improves(
    model, tokenizer
):
    problems = draw_problems("chain_sum", "evaluation", 256, seed=1)
    sampled = evaluate(model, tokenizer, problems, temperature=1.0, seed=1)[0]
    greedy = evaluate(model, tokenizer, problems, temperature=0.0)[0]
    # two standard errors around the targets 0.20 to 0.50 and 0.70
    assert 0.15 <= sampled.accuracy <= 0.56
    assert greedy.accuracy <= 0.76
    assert greedy.format_rate >= 0.98


def test_it_cannot_do_the_task_that_fine_tuning_teaches(model, tokenizer):
    problems = draw_problems("spell_backward", "evaluation", 64, seed=1)
    assert evaluate(model, tokenizer, problems, temperature=0.0)[0].accuracy <= 0.05


def test_the_card_names_command_machine_and_scores():
    card = (BASE / "README.md").read_text(encoding="utf-8")
    assert "demonstration model" in card
    assert "python scripts/pretrain_nano.py" in card
    assert re.search(r"\| machine \| .+ cores, torch", card)
    assert re.search(r"\| chain_sum +\| 1\.0 +\| +512 ", card)
