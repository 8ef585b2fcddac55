"""What would fail only in the middle of a run, tried or looked at before a base is read."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import IntervalStrategy, Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy

from k3tune.errors import ConfigError
from k3tune.files import path_text
from k3tune.option_checks import check_integer, check_number
from k3tune.plan.layout import check_count

_MOST_SEED = 2**32 - 1
# left out with a warning where it is not installed
_OPTIONAL_TRACKER = "tensorboard"


def check_values(args: TrainingArguments) -> None:
    """Numbers, trackers, the optimizer and the output folder of any trainer.

    Raises:
        ConfigError: naming the option, or what cannot be done with it.
    """
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        check_count(name, getattr(args, name))
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= _MOST_SEED:
            raise ConfigError(f"{name} is {value}, expected an integer from 0 to {_MOST_SEED}")
    check_integer("dataloader_num_workers", args.dataloader_num_workers, least=0)
    check_number("max_grad_norm", args.max_grad_norm, least=0)
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        raise ConfigError(
            f"max_steps is {args.max_steps} and num_train_epochs {args.num_train_epochs:g}, "
            "expected one of them above 0: nothing would be trained"
        )
    _check_intervals(args)
    _check_trackers(args)
    _make_optimizer(args)
    _check_output_dir(args.output_dir)


def _check_intervals(args: TrainingArguments) -> None:
    if SaveStrategy(args.save_strategy) == SaveStrategy.STEPS:
        check_number("save_steps", args.save_steps, above=0)
    if args.save_total_limit is not None:
        check_integer("save_total_limit", args.save_total_limit, least=1)
    for kind in ("logging", "eval"):
        steps = getattr(args, f"{kind}_steps")
        if IntervalStrategy(getattr(args, f"{kind}_strategy")) == IntervalStrategy.STEPS and steps:
            check_number(f"{kind}_steps", steps, above=0)


def _check_trackers(args: TrainingArguments) -> None:
    named = [args.report_to] if isinstance(args.report_to, str) else args.report_to or ()
    available = {*get_available_reporting_integrations(), _OPTIONAL_TRACKER, "none", "all"}
    for name in named:
        if name not in available:
            raise ConfigError(
                f"report_to names {name!r}, which is no tracker that is installed here: install "
                "it, or leave it out"
            )


def _make_optimizer(args: TrainingArguments) -> None:
    """Make the optimizer and its schedule for a single number, and drop them."""
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer: Any = kind([torch.zeros(1, requires_grad=True)], **options)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=1,
            num_training_steps=2,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
    # whatever torch, transformers and optional packages make of an option
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"the optimizer or its schedule cannot be made with these options: {reason}"
        ) from error


def _check_output_dir(output_dir: str | None) -> None:
    """Look whether the folder is there, or can be made, and can be written; nothing is made."""
    name = path_text(output_dir or "")
    if not output_dir or "\0" in output_dir:
        raise ConfigError(f"output_dir is {name!r}, expected a folder for what the run writes")
    path = Path(output_dir)
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"output_dir is {name}, and {path_text(existing)} is no folder: name another one"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir is {name}, and {path_text(existing)} cannot be written: name another "
            "one, or change its permissions"
        )
