"""TRL's own trainers take the model as it is: one optimizer step of each.

They patch the forward with a fused head of theirs, which reads ``base_model_prefix``,
``last_hidden_state`` and the weight of an ``nn.Linear`` head (TRL 1.16).
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from k3tune.model import load_base

COMMON = {
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "learning_rate": 1e-2,
}


@pytest.fixture
def model(fixtures):
    return load_base(fixtures / "k3_tiny", dtype=torch.float32)


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(320)}, unk_token="t300"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t319", eos_token="t317", unk_token="t300"
    )


def adapter() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")


def assert_trained(trainer) -> None:
    changed = [n for n, p in trainer.model.named_parameters() if "lora_B" in n and p.any()]
    assert len(changed) == sum("lora_B" in n for n, _ in trainer.model.named_parameters())


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sft_trainer(model, tokenizer, tmp_path, packing):
    rows = [list(range(5, 5 + length)) for length in (7, 12, 9, 4)]
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(tmp_path), packing=packing, max_length=16, **COMMON),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        peft_config=adapter(),
    )
    with torch.no_grad():
        single = [model(torch.tensor([row]), labels=torch.tensor([row])).loss for row in rows]
    expected = sum(loss * (len(row) - 1) for loss, row in zip(single, rows, strict=True)) / sum(
        len(row) - 1 for row in rows
    )
    result = trainer.train()
    # eight rows a step: the four samples once, whatever the packing
    assert result.training_loss == pytest.approx(expected.item(), rel=1e-4)
    assert_trained(trainer)


def test_grpo_trainer(model, tokenizer, tmp_path):
    def reward(completion_ids, **_):
        return [float(ids[0] % 7) for ids in completion_ids]

    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            **COMMON,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t1 t2 t3", "t4 t5 t6 t7 t8"]}),
        processing_class=tokenizer,
        peft_config=adapter(),
    )
    trainer.train()
    assert trainer.state.log_history[-1]["completions/mean_length"] == 4
    assert_trained(trainer)
