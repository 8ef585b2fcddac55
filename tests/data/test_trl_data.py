"""TRL takes the tokenizer as a processing class, and the samples and rows as they are."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_tokenizer import PIECES, SPECIAL_TOKENS
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from k3tune.data import K3Tokenizer, pack
from k3tune.data.sources import SampleOptions, load_samples
from k3tune.data.tokenizer import write_tokenizer
from k3tune.model import load_base

COMMON = {
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "learning_rate": 1e-2,
}
QUESTIONS = ("Hello", "Hello world", "don't", "123")


@pytest.fixture
def model(fixtures):
    return load_base(fixtures / "k3_tiny", dtype=torch.float32)


@pytest.fixture
def tokenizer(tmp_path, model):
    """As many ids as the tiny model has."""
    room = model.config.get_text_config().vocab_size - 256 - len(SPECIAL_TOKENS) - len(PIECES)
    more = [first + second for first in "qxzj" for second in "abcdefghijklmn"][:room]
    write_tokenizer(tmp_path, [piece.encode() for piece in (*PIECES, *more)], SPECIAL_TOKENS)
    tokenizer = K3Tokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.get_text_config().vocab_size
    return tokenizer


@pytest.fixture
def samples(tmp_path, tokenizer):
    path = tmp_path / "train.jsonl"
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}!" * count}]
        for count, text in enumerate(QUESTIONS, start=1)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = SampleOptions(max_length=128, thinking_effort=None)
    return load_samples(str(path), tokenizer, options).dataset


@torch.no_grad()
def mean_loss(model, samples) -> float:
    """Over all trained tokens, each sample run alone."""
    total, count = 0.0, 0
    for sample in samples:
        labels = torch.tensor([sample["labels"]])
        trained = int((labels[:, 1:] != -100).sum())
        ids = torch.tensor([sample["input_ids"]])
        total += model(input_ids=ids, labels=labels).loss.item() * trained
        count += trained
    return total / count


def train(model, tokenizer, dataset, output_dir, **options):
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(output_dir), per_device_train_batch_size=4, **COMMON, **options),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    )
    return trainer, trainer.train().training_loss


def test_sft_trains_the_trained_tokens_of_tokenised_samples(model, tokenizer, samples, tmp_path):
    expected = mean_loss(model, samples)
    trainer, loss = train(model, tokenizer, samples, tmp_path, max_length=128)
    assert loss == pytest.approx(expected, rel=1e-4)
    # the trainer takes the tokenizer's ids for the model's
    assert trainer.model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_sft_trains_packed_rows_as_it_trains_the_samples(model, tokenizer, samples, tmp_path):
    expected = mean_loss(model, samples)
    packed = pack(samples, 128, seed=0)
    assert len(packed.rows) < len(samples)
    # TRL's own packing stays off: its collator reads the lengths of the rows' documents
    _, loss = train(model, tokenizer, packed.rows, tmp_path, padding_free=True, max_length=None)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_grpo_renders_prompts_with_it_and_stops_on_its_end_of_a_message(model, tokenizer, tmp_path):
    def reward(completion_ids, **_):
        return [float(ids[0] % 7) for ids in completion_ids]

    prompts = [[{"role": "user", "content": text}] for text in QUESTIONS[:2]]
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            chat_template_kwargs={"thinking_effort": None},
            **COMMON,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    )
    trainer.train()
    assert trainer.eos_token_ids[0] == tokenizer.control_id("<|end_of_msg|>")
    assert trainer.state.log_history[-1]["completions/mean_length"] <= 4
