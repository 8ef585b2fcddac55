"""A recipe's YAML and flags, parsed by TRL's parser, with what it would let pass refused."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml
from transformers import TrainingArguments
from trl import SFTConfig, TrlParser

from k3tune.errors import ConfigError

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


def parse_options(parser: TrlParser, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse flags and the YAML that ``--config`` names, flags first.

    Args:
        parser: over the dataclasses of the recipe.
        argv: without the program's name; None is the process's own.

    Returns:
        One instance of each dataclass, in the parser's order.

    Raises:
        ConfigError: if the YAML cannot be read, sets environment variables, or has an unknown key,
            or a value is not usable.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _check_file(words)
    try:
        return parser.parse_args_and_config(words)
    except ConfigError:
        raise
    except (ValueError, TypeError, FileNotFoundError, NotImplementedError) as error:
        raise ConfigError(f"the options cannot be used: {error}") from error


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
    if args.max_length is None:
        raise ConfigError("max_length is None, expected the longest sample or row in tokens")


def check_trainer(args: TrainingArguments, unread: Mapping[str, str]) -> None:
    """Refuse what no trainer of K3 can have.

    Args:
        args: of one of TRL's trainers.
        unread: options that would not be read, and why; they must be at their defaults.

    Raises:
        ConfigError: naming the option, its value and the reason.
    """
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


def _check_file(words: list[str]) -> None:
    if "--config" not in words:
        return
    place = words.index("--config") + 1
    if place == len(words):
        raise ConfigError("--config names no file, expected one YAML file")
    if "--config" in words[place:]:
        raise ConfigError("--config is given twice, expected exactly one YAML file")
    path = words[place]
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = yaml.safe_load(text)
        twice = _repeated_key(yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    # a date of a 13th month is a ValueError, and brackets in brackets have an end
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML: {reason}") from error
    if twice:
        raise ConfigError(
            f"{path} has {twice}, expected each key once: the last one would be taken unsaid"
        )
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected options as keys")
    if "env" in content:
        raise ConfigError(
            f"{path} has an env block, expected options only: a config that sets environment "
            "variables changes more than the run it describes; set them where you launch"
        )


def _repeated_key(node: yaml.Node | None) -> str | None:
    """A key that stands twice in one mapping, and in which line it stands again."""
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    return f"{key.value} again in line {key.start_mark.line + 1}"
                seen.add(key.value)
            below.append(value)
    elif isinstance(node, yaml.SequenceNode):
        below.extend(node.value)
    return next(filter(None, map(_repeated_key, below)), None)
