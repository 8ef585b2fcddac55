"""A dry run's numbers are those of the run, from the config alone."""

import json
import re
import shutil

import pytest
import torch
from trl import SFTConfig

from k3tune.arguments import LoraArguments, ModelArguments
from k3tune.errors import AdapterError, ConfigError
from k3tune.lora import adapter_parameters, save_adapter
from k3tune.published.architecture import parse_config, read_config
from k3tune.train import describe_run
from k3tune.train.plan import memory_bytes, trainable_parameters
from tiny_run import COMMON, adapted

GROUPS = ["attention", "latent", "experts", "shared_experts", "dense"]


@pytest.fixture(scope="module")
def config_only(base_folder, tmp_path_factory):
    """A folder with config.json and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    shutil.copy(base_folder / "config.json", folder)
    return folder


def counts(model):
    groups = adapter_parameters(model)
    return {group: sum(p.numel() for p in found.values()) for group, found in groups.items()}


@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_trainable_parameters_are_those_of_the_attached_adapter(base_folder, config_only, form):
    options = LoraArguments(
        lora_targets=GROUPS, lora_rank=2, lora_form=form, lora_rank_pattern={"o_proj": 5}
    )
    expected = adapted(base_folder, form=form, rank_pattern={"o_proj": 5})
    found = trainable_parameters(ModelArguments(str(config_only)), options, seed=0)
    assert found == counts(expected)


def test_an_adapters_parameters_are_counted_from_its_files(base_folder, config_only, tmp_path):
    model = adapted(base_folder)
    folder = save_adapter(model, tmp_path / "adapter")
    options = LoraArguments(adapter=str(folder))
    assert trainable_parameters(ModelArguments(str(config_only)), options, 0) == counts(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_base_is_estimated_to_the_byte(base_folder, config_only, tmp_path, dtype):
    model = adapted(base_folder, dtype=getattr(torch, dtype))
    held = sum(p.nbytes for name, p in model.named_parameters() if "lora" not in name)
    architecture = parse_config(read_config(config_only))
    options = ModelArguments(str(config_only), dtype=dtype)
    parts = memory_bytes(architecture, options, SFTConfig(str(tmp_path), **COMMON), 100)
    assert parts["base, experts packed"] + parts["base, trunk"] == held
    assert (parts["factors"], parts["gradients"], parts["optimizer (AdamW)"]) == (400, 400, 800)


def test_a_dry_run_says_config_parameters_and_memory(config_only, tmp_path):
    text = describe_run(
        ModelArguments(str(config_only)),
        LoraArguments(lora_targets=GROUPS, lora_rank=2),
        SFTConfig(str(tmp_path), **COMMON),
    )
    assert "lora_rank: 2\n" in text and "max_length: 64\n" in text
    for group in GROUPS:
        assert re.search(rf"^{group}: [\d,]+$", text, re.MULTILINE)
    assert re.search(r"^total: \d.* MB$", text, re.MULTILINE)
    assert "computed, not measured" in text


def test_a_dry_run_refuses_what_the_run_would(config_only, tmp_path):
    model = ModelArguments(str(config_only))
    with pytest.raises(AdapterError, match="matches no module"):
        lora = LoraArguments(lora_targets=["nothing"])
        describe_run(model, lora, SFTConfig(str(tmp_path), **COMMON))
    with pytest.raises(ConfigError, match="bf16"):
        describe_run(model, LoraArguments(), SFTConfig(str(tmp_path), **{**COMMON, "bf16": True}))


def test_the_published_sizes_need_no_weights(repository, tmp_path):
    config = json.loads((repository / "tests/fixtures/published_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = LoraArguments(lora_targets=["experts"], lora_rank=1, lora_form="shared_outer")
    found = trainable_parameters(ModelArguments(str(tmp_path)), options, 0)
    layer = 2 * (3584 + 896 * 3072) + 896 * 3072 + 3584
    assert found == {"experts": 92 * layer}
