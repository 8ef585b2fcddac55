"""What TRL's parser takes, what it would let pass that is refused, and how that is said."""

import os

import pytest
from trl import GRPOConfig, SFTConfig

from k3tune.arguments import (
    DataArguments,
    LoraArguments,
    ModelArguments,
    MonitorArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
    RunArguments,
)
from k3tune.errors import ConfigError
from k3tune.train import parse_options
from k3tune.train.run_config import RunConfig

COMMON = (ModelArguments, LoraArguments, RunArguments)
OF_SFT = (*COMMON, DataArguments, SFTConfig)
OF_GRPO = (
    *(*COMMON, PromptArguments, RewardArguments, RolloutArguments, MonitorArguments),
    GRPOConfig,
)
YAML = """
base: some/folder
train_path: train.jsonl
output_dir: {output_dir}
bf16: false
use_cpu: true
learning_rate: 1e-4
lora_rank: 4
"""


@pytest.fixture
def parse(tmp_path):
    def parse(*flags, yaml="", without=()):
        text = YAML.format(output_dir=tmp_path)
        lines = [line for line in text.splitlines() if not line.startswith(tuple(without) or "\0")]
        file = tmp_path / "run.yaml"
        file.write_text("\n".join(lines) + "\n" + yaml)
        kinds = (ModelArguments, LoraArguments, DataArguments, RunArguments, SFTConfig)
        return parse_options(kinds, ["--config", str(file), *flags])

    return parse


def test_default_yaml_and_flag_come_in_this_order(parse):
    _, lora, _, _, training = parse("--lora_rank", "8")
    assert (lora.lora_alpha, training.learning_rate, lora.lora_rank) == (32.0, 1e-4, 8)


def test_lists_and_mappings_come_from_yaml_and_from_flags(parse):
    _, lora, *_ = parse(yaml="lora_targets: [dense]\nlora_rank_pattern: {down_proj: 2}\n")
    assert (lora.lora_targets, lora.lora_rank_pattern) == (["dense"], {"down_proj": 2})
    _, lora, *_ = parse(
        *("--lora_targets", "dense", "latent"),
        *("--lora_layers", "0", "2", "--lora_rank_pattern", '{"down_proj": 3}'),
    )
    assert (lora.lora_targets, lora.lora_layers) == (["dense", "latent"], [0, 2])
    assert lora.lora_rank_pattern == {"down_proj": 3}


def test_switches_can_be_turned_off_by_flag(parse):
    _, _, data, run, _ = parse("--no_thinking", "--dry_run")
    assert (data.thinking, run.dry_run) == (False, True)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("env: {SECRET: 1}\n", "has an env block"),
        ("lora_rnak: 8\n", "has lora_rnak, expected options .* did you mean lora_rank?"),
        ("lora-rank: 8\n", "has lora-rank, .* did you mean lora_rank?"),
        ("1: 8\n", "has 1, expected options of this recipe: --help lists them"),
        ("temperature: 1\n", "has temperature, which this recipe does not know and recipes/grpo"),
        ("lora_rank: 8.5\n", r"lora_rank is 8.5, expected an integer of at least 1"),
        ("lora_targets: experts\n", "lora_targets is 'experts', expected a list of attention"),
        ("lora_rslora: 3\n", "lora_rslora is 3, expected true or false"),
        ("kernels: cuda\n", "kernels is 'cuda', expected one of auto, triton, cpu, reference"),
        ("- a\n- b\n", "is no YAML"),
        ("lora_rank: 8\nlora_rank: 4\n", "lora_rank again in line"),
        ("seed: 2026-13-45\n", "is no YAML: month must be"),
        ("max_steps: 3.5\n", "max_steps is 3.5, expected a whole number"),
        ("max_steps:\n", "max_steps is None, expected a whole number"),
        ("max_steps: many\n", "argument --max_steps.*: invalid int value: 'many'; --help lists"),
        ("weight_decay: [0.1]\n", r"weight_decay is \[0.1\], expected a number"),
        ("logging_steps: true\n", "logging_steps is True, expected a number"),
        ("packing: 1\n", "packing is 1, expected true or false"),
        ("run_name: 2026\n", "run_name is 2026, expected a text .in quotes"),
        ("eval_strategy: no\n", "eval_strategy is False, expected a text .in quotes"),
        ("optim: none_such\n", "the options cannot be used: none_such is not a valid"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(parse, yaml, message):
    with pytest.raises(ConfigError, match=message):
        parse(yaml=yaml, without=("lora_rank",))
    assert "SECRET" not in os.environ


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_rnak", "8"], "the command line has lora_rnak, .* did you mean lora_rank?"),
        (["8"], "the command line has 8, expected options"),
        (["--num_generations", "4"], "has num_generations, which .* recipes/grpo.py does"),
        (["--lora_rank"], "argument --lora_rank.*: expected one argument; --help lists them"),
        (["--config=other.yaml"], "--config is given twice"),
    ],
)
def test_flags_that_cannot_be_meant_are_one_sentence(parse, words, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse(*words)
    assert "\n" not in str(error.value)


def test_a_required_option_is_asked_for(parse):
    with pytest.raises(ConfigError, match="are required: --base"):
        parse(without=("base",))


def test_help_says_where_options_come_from(parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "--config FILE" in out and "--lora_rank" in out


@pytest.mark.parametrize(
    ("name", "recipe", "said"),
    [
        ("nano_grpo", "recipes/grpo.py", "has max_prompt_length, rewards, engine, activations and"),
        ("nano_sft", "recipes/sft.py", "has max_length, packing, which this recipe does not know"),
    ],
)
def test_a_file_of_another_recipe_is_sent_there(repository, name, recipe, said):
    kinds = OF_GRPO if recipe == "recipes/sft.py" else OF_SFT
    with pytest.raises(ConfigError, match=f"{said}.*: run {recipe}, or leave them out"):
        parse_options(kinds, ["--config", str(repository / f"recipes/configs/{name}.yaml")])


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    for text in ("", "# nothing yet\n"):
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"run.yaml is empty, expected options as keys"):
            parse_options((RunArguments,), ["--config", str(tmp_path / "run.yaml")])


def test_the_config_a_run_wrote_runs_the_same_again(parse, tmp_path):
    *own, training = parse(yaml="deepspeed:\nreport_to: [tensorboard]\nwarmup_steps: 0.1\n")
    written = RunConfig.resolve(training, own)
    (tmp_path / "again.yaml").write_text(written.text)
    kinds = (ModelArguments, LoraArguments, DataArguments, RunArguments, SFTConfig)
    *own, training = parse_options(kinds, ["--config", str(tmp_path / "again.yaml")])
    assert RunConfig.resolve(training, own).options == written.options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config"], "names no file"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
        (["--config", "a", "--config", "b"], "given twice"),
    ],
)
def test_a_config_file_that_is_not_there_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_options((RunArguments,), words)


def test_field_names_are_unique_and_have_help():
    seen = set(SFTConfig.__dataclass_fields__)
    for group in (ModelArguments, LoraArguments, DataArguments, RunArguments):
        for name, field in group.__dataclass_fields__.items():
            assert name not in seen and name != "config"
            assert field.metadata["help"].endswith((".", "expert", ")"))
            seen.add(name)
