"""TRL's options held against what K3, and a run that must resume, can have."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from k3tune.errors import ConfigError
from k3tune.option_checks import check_choice
from k3tune.plan.layout import check_count
from k3tune.train.rehearsal import check_values

AUTOCAST_REASON = (
    "expected false: autocast would compute K3's F32 parts (router, decay, norms, SiTU, combine) "
    "in 16 bits. Precision belongs to the model: BF16 base with its F32 tensors, FP32 factors"
)

# Options that must be off, and why.
_REFUSED = {
    "bf16": f"{AUTOCAST_REASON}. TRL turns it on where it is not set: set it",
    "fp16": AUTOCAST_REASON,
    "bf16_full_eval": AUTOCAST_REASON,
    "fp16_full_eval": AUTOCAST_REASON,
    "save_only_model": "expected false: without the optimizer's state a run cannot be resumed",
    "ignore_data_skip": "expected false: a resumed run would see samples twice",
    "push_to_hub": "expected false: upload output_dir/adapter yourself once the run is done",
    "auto_find_batch_size": "expected false: the run would not be the one its config describes",
    "fsdp": "expected none: use DeepSpeed ZeRO-1 or ZeRO-2",
    "use_liger_kernel": "expected false: K3 has kernels of its own",
    "torch_compile": "expected false: not tested with the packed experts",
}

LOSS_TYPES = ("nll", "dft")
"""TRL's losses of SFT."""

TOKENISED = {"skip_prepare_dataset": True}
"""TRL's ``dataset_kwargs`` for samples that it shall take as they are."""

# TRL's options that samples tokenised and packed by k3tune.data never reach.
_UNREAD = {
    "model_init_kwargs": "base, dtype and kernels say how the base is loaded",
    "trust_remote_code": "no remote code is ever run",
    "chat_template_path": "chats are rendered by k3tune.data",
    "dataset_text_field": "a text stands under text",
    "eos_token": "the tokenizer's files say it",
    "truncation_mode": "a sample longer than max_length is left out or refused, none is cut",
    "packing_strategy": "k3tune.data packs whole samples by best fit",
    "padding_free": "packing says it",
    "completion_only_loss": "loss falls on assistant messages and completions",
    "assistant_only_loss": "loss falls on assistant messages and completions",
    "shuffle_dataset": "rows are drawn in an order of the seed",
}


def check_training(args: SFTConfig) -> None:
    """Refuse what TRL's SFT or transformers allow and K3, or a run that must resume, does not.

    Raises:
        ConfigError: naming the option, its value and the reason.
    """
    check_trainer(args, _UNREAD)
    if args.dataset_kwargs not in (None, TOKENISED):
        raise ConfigError(
            f"dataset_kwargs is {args.dataset_kwargs!r}, expected None: samples come tokenised"
        )
    check_count("max_length", args.max_length)
    check_choice("loss_type", args.loss_type, LOSS_TYPES)


def check_trainer(args: TrainingArguments, unread: Mapping[str, str]) -> None:
    """Refuse what no trainer of K3 can have.

    Args:
        args: of one of TRL's trainers.
        unread: options that would not be read, and why; they must be at their defaults.

    Raises:
        ConfigError: naming the option, its value and the reason.
    """
    check_values(args)
    for name, reason in _REFUSED.items():
        if value := getattr(args, name):
            raise ConfigError(f"{name} is {value!r}, {reason}")
    defaults = {field.name: field.default for field in fields(args)}
    for name, reason in unread.items():
        if getattr(args, name) != defaults[name]:
            raise ConfigError(
                f"{name} is {getattr(args, name)!r}, which would not be read: {reason}; leave it "
                "out"
            )
    launcher: Any = args.accelerator_config
    needed = {
        "mixed_precision": (args.mixed_precision, ("no",), f"as for bf16, {AUTOCAST_REASON}"),
        "average_tokens_across_devices": (
            args.average_tokens_across_devices,
            (True,),
            "a token would weigh more where a process has fewer of them",
        ),
        "accelerator_config.use_seedable_sampler": (
            launcher.use_seedable_sampler,
            (True,),
            "the order of rows must depend on the seed alone, or a resumed run has another",
        ),
    }
    for name, (value, expected, reason) in needed.items():
        if value not in expected:
            raise ConfigError(f"{name} is {value!r}, expected {expected[0]!r}: {reason}")
