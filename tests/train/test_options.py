"""What TRL's parser takes, and what it would let pass that is refused."""

import os

import pytest
from trl import SFTConfig, TrlParser

from k3tune.arguments import DataArguments, LoraArguments, ModelArguments, RunArguments
from k3tune.errors import ConfigError
from k3tune.train import parse_options

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
        parser = TrlParser((ModelArguments, LoraArguments, DataArguments, RunArguments, SFTConfig))
        return parse_options(parser, ["--config", str(file), *flags])

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
        ("lora_rnak: 8\n", "lora_rnak"),
        ("lora_rank: 8.5\n", r"lora_rank is 8.5, expected an integer of at least 1"),
        ("lora_targets: experts\n", "lora_targets is 'experts', expected a list of texts"),
        ("lora_rslora: 3\n", "lora_rslora is 3, expected true or false"),
        ("kernels: cuda\n", "kernels is 'cuda', expected one of auto, triton, cpu, reference"),
        ("- a\n- b\n", "is no YAML"),
        ("lora_rank: 8\nlora_rank: 4\n", "lora_rank again in line"),
        ("seed: 2026-13-45\n", "is no YAML: month must be"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(parse, yaml, message):
    with pytest.raises(ConfigError, match=message):
        parse(yaml=yaml, without=("lora_rank",))
    assert "SECRET" not in os.environ


def test_an_unknown_flag_ends_the_program(parse, capsys):
    with pytest.raises((SystemExit, ConfigError)) as error:
        parse("--lora_rnak", "8")
    assert "lora_rnak" in capsys.readouterr().err + str(error.value)


def test_a_required_option_is_asked_for(parse, capsys):
    with pytest.raises(SystemExit):
        parse(without=("base",))
    assert "--base" in capsys.readouterr().err


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
        parse_options(TrlParser((RunArguments,)), words)


def test_field_names_are_unique_and_have_help():
    seen = set(SFTConfig.__dataclass_fields__)
    for group in (ModelArguments, LoraArguments, DataArguments, RunArguments):
        for name, field in group.__dataclass_fields__.items():
            assert name not in seen and name != "config"
            assert field.metadata["help"].endswith((".", "expert", ")"))
            seen.add(name)
