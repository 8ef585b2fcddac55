"""TRL's SFTTrainer trains an attached adapter, experts included, and nothing else."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from k3tune.lora import adapter_state, attach_lora
from k3tune.lora.fingerprint import base_fingerprint
from k3tune.lora.watch import FactorWatch


class Watch(TrainerCallback):
    def __init__(self, model):
        self.watch = FactorWatch(model)

    def on_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.watch.after_step(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_sft_trainer(base, spec, tmp_path, form, checkpointing):
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t90"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t95", eos_token="t93")
    model = attach_lora(base, spec(form=form))
    before, fingerprint = adapter_state(model), base_fingerprint(model)
    rows = [torch.randint(0, 90, (12,)).tolist() for _ in range(8)]
    watch = Watch(model)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            learning_rate=1e-3,
            activation_checkpointing=checkpointing,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    assert trainer.model is model
    assert watch.watch.report.untouched_experts == 0
    after = adapter_state(model)
    assert not any(torch.equal(before[key], after[key]) for key in before)
    assert base_fingerprint(model) == fingerprint
