"""Training on the frozen base: TRL's trainers over K3, resumable, logged, without pickle."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.train.launch import prepare_launch, run_recipe
    from k3tune.train.parsing import parse_options
    from k3tune.train.plan import describe_run
    from k3tune.train.setup import build_datasets, build_model, load_tokenizer
    from k3tune.train.sft import K3SFTTrainer

__all__ = [
    "K3SFTTrainer",
    "build_datasets",
    "build_model",
    "describe_run",
    "load_tokenizer",
    "parse_options",
    "prepare_launch",
    "run_recipe",
]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "K3SFTTrainer": "k3tune.train.sft",
        "build_datasets": "k3tune.train.setup",
        "build_model": "k3tune.train.setup",
        "describe_run": "k3tune.train.plan",
        "load_tokenizer": "k3tune.train.setup",
        "parse_options": "k3tune.train.parsing",
        "prepare_launch": "k3tune.train.launch",
        "run_recipe": "k3tune.train.launch",
    },
)
