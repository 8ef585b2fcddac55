"""Every own option is checked, and its error shows the value that was seen."""

import dataclasses
import subprocess
import sys
from typing import get_args

import pytest

from k3tune import arguments, cli
from k3tune.arguments import DataArguments, LoraArguments, ModelArguments, RunArguments
from k3tune.commands import flags, serve
from k3tune.data.chat import THINKING_EFFORTS
from k3tune.errors import ConfigError
from k3tune.lora import LoraSpec
from k3tune_kernels.dispatch import BACKENDS

REQUIRED = {ModelArguments: {"base": "b"}, DataArguments: {"train_path": "t"}}
WRONG = [
    (ModelArguments, "base", "", "text that is not empty"),
    (ModelArguments, "base", 3, "text that is not empty"),
    (ModelArguments, "tokenizer", "", "text that is not empty"),
    (ModelArguments, "dtype", "bf16", "bfloat16, float32"),
    (ModelArguments, "kernels", "cuda", "auto, triton, cpu, reference"),
    (LoraArguments, "lora_targets", "experts", "a list of attention, "),
    (LoraArguments, "lora_targets", [1], "module-name patterns (strings)"),
    (LoraArguments, "lora_targets", ["dense", "dense"], "each target once"),
    (LoraArguments, "lora_rank", 8.5, "integer of at least 1"),
    (LoraArguments, "lora_rank", True, "integer of at least 1"),
    (LoraArguments, "lora_rank", 0, "integer of at least 1"),
    (LoraArguments, "lora_rank", 2**20 + 1, "at most 1048576"),
    (LoraArguments, "lora_alpha", 0, "number above 0"),
    (LoraArguments, "lora_alpha", "32", "number above 0"),
    (LoraArguments, "lora_alpha", float("nan"), "number above 0"),
    (LoraArguments, "lora_form", "stacked", "per_expert, shared_outer"),
    (LoraArguments, "lora_rank_pattern", "{", "mapping of pattern to number"),
    (LoraArguments, "lora_rank_pattern", [1], "mapping of pattern to number"),
    (LoraArguments, "lora_rank_pattern", {"o_proj": 1.5}, "integer of at least 1"),
    (LoraArguments, "lora_alpha_pattern", {"o_proj": -1}, "number above 0"),
    (LoraArguments, "lora_layers", 3, "a list of zero-based layers"),
    (LoraArguments, "lora_layers", [-1], "zero-based layers"),
    (LoraArguments, "lora_layers", [True], "zero-based layers"),
    (LoraArguments, "lora_rslora", 1, "true or false"),
    (LoraArguments, "lora_dropout", 1.0, "from 0 to below 1"),
    (LoraArguments, "lora_dropout", 0.1, "lora_dropout is 0.1 and targets include the experts"),
    (LoraArguments, "lora_init", "zeros", "kaiming, gaussian"),
    (LoraArguments, "adapter", "", "text that is not empty"),
    (DataArguments, "train_path", None, "text that is not empty"),
    (DataArguments, "eval_path", "", "text that is not empty"),
    (DataArguments, "eval_fraction", 1.0, "at least 0 and below 1"),
    (DataArguments, "on_bad_sample", "drop", "skip, error"),
    (DataArguments, "thinking", "no", "true or false"),
    (DataArguments, "thinking_effort", "medium", "none, low, high, max"),
    (DataArguments, "train_opening_tag", None, "true or false"),
    (RunArguments, "dry_run", "yes", "true or false"),
]


@pytest.mark.parametrize(("group", "name", "value", "expected"), WRONG)
def test_a_wrong_value_is_shown_with_what_was_expected(group, name, value, expected):
    with pytest.raises(ConfigError, match=name) as error:
        group(**{**REQUIRED.get(group, {}), name: value})
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    shown = shown[0] if isinstance(shown, list) and len(shown) == 1 else shown
    assert repr(shown) in str(error.value) and expected in str(error.value)


def test_every_field_has_a_wrong_value_above():
    groups = (ModelArguments, LoraArguments, DataArguments, RunArguments)
    fields = {(group, field.name) for group in groups for field in dataclasses.fields(group)}
    assert fields == {(group, name) for group, name, *_ in WRONG}


def test_two_sources_of_evaluation_are_one_too_many():
    with pytest.raises(ConfigError, match="leave the other out"):
        DataArguments("t", eval_path="e", eval_fraction=0.1)
    assert DataArguments("t", eval_fraction=0.1).has_evaluation
    assert not DataArguments("t").has_evaluation


def test_the_tokenizer_is_the_bases_unless_named():
    assert ModelArguments("b").tokenizer_path == "b"
    assert ModelArguments("b", tokenizer="t").tokenizer_path == "t"


def test_lora_options_make_a_spec():
    options = LoraArguments(
        lora_targets=["dense", "latent"],
        lora_rank=4,
        lora_layers=[0, 1],
        lora_rank_pattern='{"down_proj": 2}',
        lora_rslora=True,
    )
    expected = LoraSpec(
        targets=("dense", "latent"),
        rank=4,
        alpha=32.0,
        rank_pattern={"down_proj": 2},
        layers=(0, 1),
        use_rslora=True,
        seed=5,
    )
    assert options.spec(5) == expected


def test_choices_are_those_of_the_library():
    assert arguments.KERNELS == BACKENDS
    assert arguments.EFFORTS == ("none", *THINKING_EFFORTS)


def test_flags_of_commands_offer_the_same_choices():
    def choices(flag):
        return set(get_args(get_args(flag)[0]))

    assert choices(flags.Kernels) == set(arguments.KERNELS)
    assert choices(flags.DtypeName) == {"auto", *arguments.DTYPES}
    assert choices(cli.ThinkingEffort) == set(arguments.EFFORTS)
    assert choices(serve.Activations) == set(arguments.ACTIVATIONS)


def test_options_are_read_without_torch(repository):
    code = "import sys, k3tune.arguments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repository).returncode == 0
