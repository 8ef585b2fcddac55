"""Options of GRPO: own ones checked with the value that was seen, TRL's held against K3."""

import dataclasses
import inspect

import pytest
from tiny_grpo import make_grpo
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from k3tune import arguments
from k3tune.arguments import (
    LoraArguments,
    ModelArguments,
    MonitorArguments,
    ParallelArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
    RunArguments,
)
from k3tune.errors import ConfigError
from k3tune.rl.options import _CHOICES, _UNREAD, check_grpo, check_overlap, sampling_of
from k3tune.train import parse_options

OWN = (
    *(ModelArguments, LoraArguments, PromptArguments, RewardArguments),
    *(RolloutArguments, MonitorArguments, ParallelArguments, RunArguments),
)
WRONG = [
    (PromptArguments, "max_prompt_length", 0, "integer of at least 1"),
    (RolloutArguments, "engine", "gpu", "expected one of local, k3tune, vllm, sglang"),
    (RolloutArguments, "engine_urls", ["http://a"], "none for the local one"),
    (RolloutArguments, "rollout_batch_size", 0, "integer of at least 1"),
    (RolloutArguments, "activations", "fp8", "none, bf16, mxfp8"),
    (RolloutArguments, "train_activations", "fp8", "none, bf16, mxfp8"),
    (RolloutArguments, "rollout_adapter_dtype", "float16", "bfloat16, float32"),
    (RolloutArguments, "routing", True, "ignore, compare, replay"),
    (RolloutArguments, "importance_sampling", "sequence", "token_truncate, token_mask"),
    (RolloutArguments, "importance_cap", 1.0, "number above 1"),
    (RolloutArguments, "on_stale_version", "drop", "error, correct"),
    (RolloutArguments, "on_unchanged_push", "skip", "error, count"),
    (RolloutArguments, "overlap", "yes", "true or false"),
    (RolloutArguments, "keep_rollouts", 0, "integer of at least 1"),
    (RewardArguments, "rewards", "format", "list of texts"),
    (RewardArguments, "reward_deadline_s", 0, "number above 0"),
    (RewardArguments, "on_bad_reward", "zero", "error, skip"),
    (MonitorArguments, "floor_prompts", 3, "0 or at least 4"),
    (MonitorArguments, "floor_samples", 0, "integer of at least 1"),
    (MonitorArguments, "canary", "on", "true or false"),
    (MonitorArguments, "stop_on_alarm", 1, "true or false"),
]


@pytest.mark.parametrize(("group", "name", "value", "expected"), WRONG)
def test_a_wrong_value_is_shown_with_what_was_expected(group, name, value, expected):
    required = {"train_path": "t"} if group is PromptArguments else {}
    with pytest.raises(ConfigError, match=name) as error:
        group(**{**required, name: value})
    shown = str(value) if name == "floor_prompts" else repr(value)
    assert shown in str(error.value) and expected in str(error.value)


def test_every_rl_field_has_a_wrong_value_above():
    groups = (RolloutArguments, RewardArguments, MonitorArguments)
    fields = {(group, field.name) for group in groups for field in dataclasses.fields(group)}
    assert fields <= {(group, name) for group, name, *_ in WRONG}


def test_a_correction_needs_something_that_corrects():
    with pytest.raises(ConfigError, match="it is what corrects"):
        RolloutArguments(on_stale_version="correct", importance_sampling="none")


SERVED = {"engine": "vllm", "engine_urls": ["http://a"]}


@pytest.mark.parametrize("options", [{"on_stale_version": "correct"}, SERVED])
def test_overlap_needs_servers_and_a_correction(options):
    with pytest.raises(ConfigError, match="one version old, and weighed for it"):
        RolloutArguments(overlap=True, **options)
    RolloutArguments(overlap=True, **SERVED, on_stale_version="correct")


@pytest.mark.parametrize(
    ("options", "stale", "said"),
    [
        ({"num_iterations": 2}, "correct", "samples serve 8 batches .* its own samples"),
        ({}, "error", "on_stale_version is 'error', expected 'correct'"),
    ],
)
def test_with_overlap_every_step_has_samples_of_its_own(tmp_path, options, stale, said):
    base = {"bf16": False, "use_cpu": True, "report_to": "none", "gradient_accumulation_steps": 4}
    right, rollout = GRPOConfig(str(tmp_path), **base), RolloutArguments(on_stale_version="correct")
    check_overlap(right, rollout)
    with pytest.raises(ConfigError, match=said):
        check_overlap(
            GRPOConfig(str(tmp_path), **base, **options), RolloutArguments(on_stale_version=stale)
        )


@pytest.mark.parametrize("urls", [None, [], "http://a"])
def test_servers_need_addresses(urls):
    with pytest.raises(ConfigError, match="engine_urls is"):
        RolloutArguments(engine="vllm", engine_urls=urls)


def test_field_names_are_unique_and_have_help():
    seen = set(GRPOConfig.__dataclass_fields__)
    for group in OWN:
        for name, field in group.__dataclass_fields__.items():
            assert name not in seen and name != "config"
            assert field.metadata["help"].endswith((".", "expert", ")", "local", "none"))
            seen.add(name)


def test_choices_are_those_of_the_library():
    from typing import get_args

    from k3tune.rl.numerics import Activations

    assert arguments.ACTIVATIONS == get_args(Activations)


@pytest.mark.parametrize("name", ["nano_grpo", "k3_grpo"])
def test_the_shipped_files_are_options_that_can_be_used(repository, name, tmp_path):
    file = repository / "recipes" / "configs" / f"{name}.yaml"
    words = ["--config", str(file), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    *own, training = parse_options((*OWN, GRPOConfig), words)
    assert {type(group) for group in own} == set(OWN)
    check_grpo(training)
    assert sampling_of(training, (1, 2)).stop_token_ids == (1, 2)


@pytest.mark.parametrize("name", sorted(_UNREAD))
def test_what_would_not_be_read_is_refused(tmp_path, name):
    options = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    check_grpo(options)
    setattr(options, name, "changed")
    with pytest.raises(ConfigError, match=f"{name} is 'changed', which would not be read"):
        check_grpo(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True}, "autocast would compute"),
        ({"temperature": 0.0}, "temperature is 0.0, expected a finite number above 0"),
        ({"max_completion_length": None}, "max_completion_length is None"),
        ({"torch_compile": True}, "torch_compile is True"),
        ({"seed": -1}, "seed is -1, expected an integer from 0"),
        ({"loss_type": "zip"}, "loss_type is 'zip', expected one of grpo, bnpo, dr_grpo, dapo"),
        ({"scale_rewards": "x"}, "scale_rewards is 'x', expected one of group, batch, none"),
        ({"beta": -0.1}, "beta is -0.1, expected a number of at least 0"),
        ({"num_iterations": 0}, "num_iterations is 0, expected an integer of at least 1"),
        ({"reward_weights": ["a"]}, "reward_weights are .'a'., expected a list of numbers"),
    ],
)
def test_what_k3_cannot_have_is_refused(tmp_path, options, message):
    found = GRPOConfig(
        str(tmp_path), **{"bf16": False, "use_cpu": True, "report_to": "none", **options}
    )
    with pytest.raises(ConfigError, match=message):
        check_grpo(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 18}, "the data has 8 prompts, expected at least the 9"),
        ({"reward_weights": [1.0, 2.0]}, "expected one for each of the 1 rewards"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "evaluation data is not given"),
        ({"evaluate": True}, "eval_strategy is 'no' and evaluation data is given"),
        ({"rewards": ["exact_match"]}, "a reward is a str, expected a function"),
    ],
)
def test_data_and_rewards_must_fit(base_folder, prompts_file, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        make_grpo(base_folder, prompts_file, tmp_path, **options)


def test_choices_are_those_that_trl_knows():
    source = inspect.getsource(grpo_trainer)
    assert all(f'"{choice}"' in source for choices in _CHOICES.values() for choice in choices)
    options = GRPOConfig.__dataclass_fields__
    assert all(options[name].default in choices for name, choices in _CHOICES.items())
