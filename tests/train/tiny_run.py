"""The smallest run that has every part: base and tokenizer on disk, samples, model, trainer."""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig

from checkpoints import build_checkpoint
from k3tune.data import K3Tokenizer
from k3tune.data.tokenizer import write_tokenizer
from k3tune.lora import LoraSpec, attach_lora
from k3tune.model import load_base
from k3tune.train import K3SFTTrainer

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[UNK]",
    "[PAD]",
)
PIECES = ("message", " role", '="', "user", "assistant", "think", "response", "system")
GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_length": 64,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 4,
}


def make_base(folder: Path) -> Path:
    """Write a checkpoint and its tokenizer into one folder: a dense KDA and an MLA MoE layer."""
    build_checkpoint(
        folder,
        vocab_size=256 + len(PIECES) + len(SPECIAL_TOKENS),
        num_hidden_layers=2,
        mla_layers=[1],
    )
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of these tests, 272 ids, beside a checkpoint."""
    write_tokenizer(folder, [piece.encode() for piece in PIECES], SPECIAL_TOKENS)
    return folder


def write_samples(file: Path, count: int) -> Path:
    """Write chats, the longer the later."""
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question, answer = f"{number}+{number}", str(2 * number) * (1 + number % 3)
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file


def rows(lengths: tuple[int, ...] = (7, 12, 9, 4, 15, 6, 11, 8), *, masked: int = 2) -> Dataset:
    """Samples of random tokens, the first ``masked`` of each without loss, ids from 1."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "labels": [[-100] * masked + row[masked:] for row in ids],
            "sample_id": list(range(1, len(ids) + 1)),
        }
    )


def adapted(
    base_folder: Path, *, live: bool = False, dtype: torch.dtype = torch.float32, **spec: Any
) -> Any:
    """A model with an adapter on everything; ``live`` makes B non-zero."""
    model = attach_lora(
        load_base(base_folder, dtype=dtype),
        LoraSpec(**{"targets": GROUPS, "rank": 2, "alpha": 4, **spec}),
    )
    if live:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05, generator=generator)
    return model


def make_trainer(
    base_folder: Path,
    output_dir: Path,
    dataset: Dataset | None = None,
    *,
    model: Any = None,
    eval_dataset: Dataset | None = None,
    callbacks: Any = None,
    **options: Any,
) -> K3SFTTrainer:
    """A trainer on the CPU; ``options`` go to TRL's arguments."""
    return K3SFTTrainer(
        adapted(base_folder) if model is None else model,
        SFTConfig(str(output_dir), **{**COMMON, **options}),
        rows() if dataset is None else dataset,
        eval_dataset,
        processing_class=K3Tokenizer.from_pretrained(base_folder),
        callbacks=callbacks,
    )
