"""A dry run's numbers are those of the run, from the config alone."""

import json
import re
import shutil

import pytest
import torch
from trl import SFTConfig

from k3tune.arguments import LoraArguments, ModelArguments, ParallelArguments
from k3tune.errors import AdapterError, ConfigError
from k3tune.lora import adapter_parameters, save_adapter
from k3tune.published.architecture import parse_config, read_config
from k3tune.train import describe_run
from k3tune.train.plan import memory_bytes, run_adapter, run_layout
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
    found = run_adapter(parse_config(read_config(config_only)), options, seed=0)
    assert found.by_group == counts(expected)


def test_an_adapters_parameters_are_counted_from_its_files(base_folder, config_only, tmp_path):
    model = adapted(base_folder)
    folder = save_adapter(model, tmp_path / "adapter")
    options = LoraArguments(adapter=str(folder))
    architecture = parse_config(read_config(config_only))
    found = run_adapter(architecture, options, 0)
    assert found.by_group == counts(model)
    # as from the options it was made with
    expected = run_adapter(architecture, LoraArguments(lora_targets=GROUPS, lora_rank=2), 0)
    assert (found.each, found.shared, found.ranks) == (
        expected.each,
        expected.shared,
        expected.ranks,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_base_is_estimated_to_the_byte(base_folder, config_only, tmp_path, dtype):
    model = adapted(base_folder, dtype=getattr(torch, dtype))
    held = sum(p.nbytes for name, p in model.named_parameters() if "lora" not in name)
    architecture = parse_config(read_config(config_only))
    training = SFTConfig(str(tmp_path), **COMMON)
    options = ModelArguments(str(config_only), dtype=dtype)
    layout = run_layout(options, training, 64, ParallelArguments())
    adapter = run_adapter(architecture, LoraArguments(lora_targets=GROUPS, lora_rank=2), 0)
    parts = memory_bytes(architecture, adapter, training, layout)
    assert parts["packed_experts"] + parts["trunk"] == held
    assert parts["adapter"] == 4 * sum(counts(model).values())
    assert layout.tokens == 4 * 64


@pytest.mark.parametrize("trunk_shard", ["none", "node", "2"])
def test_a_run_to_be_spread_is_estimated_for_one_of_its_processes(
    config_only, tmp_path, monkeypatch, trunk_shard
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    architecture = parse_config(read_config(config_only))
    training = SFTConfig(str(tmp_path), **COMMON)
    parallel = ParallelArguments(expert_parallel_size=2, trunk_shard=trunk_shard)
    layout = run_layout(ModelArguments(str(config_only)), training, 64, parallel)
    assert (layout.gpus, layout.zero_stage) == (2, 1)
    assert layout.trunk_ranks == (1 if trunk_shard == "none" else 2)
    adapter = run_adapter(architecture, LoraArguments(lora_targets=["experts"], lora_rank=2), 0)
    parts = memory_bytes(architecture, adapter, training, layout)
    alone = run_layout(ModelArguments(str(config_only)), training, 64, ParallelArguments())
    whole = memory_bytes(architecture, adapter, training, alone)
    assert 2 * parts["packed_experts"] == whole["packed_experts"]
    assert 2 * parts["adapter"] == whole["adapter"]
    assert (parts["trunk"] < whole["trunk"]) == (trunk_shard != "none")


def test_a_dry_run_says_config_parameters_and_memory(config_only, tmp_path):
    text = describe_run(
        ModelArguments(str(config_only)),
        LoraArguments(lora_targets=GROUPS, lora_rank=2),
        SFTConfig(str(tmp_path), **COMMON),
    )
    assert "lora_rank: 2\n" in text and "max_length: 64\n" in text
    for group in GROUPS:
        assert re.search(rf"^{group}: [\d,]+$", text, re.MULTILINE)
    assert re.search(r"^total +\d.* MB$", text, re.MULTILINE)
    assert "computed, not measured" in text


def test_a_dry_run_refuses_what_the_run_would(config_only, repository, tmp_path):
    model = ModelArguments(str(config_only))
    with pytest.raises(AdapterError, match="matches no module"):
        lora = LoraArguments(lora_targets=["nothing"])
        describe_run(model, lora, SFTConfig(str(tmp_path), **COMMON))
    with pytest.raises(AdapterError, match="is the adapter of another base"):
        folder = repository / "tests" / "fixtures" / "k3_tiny" / "adapter"
        lora = LoraArguments(adapter=str(folder))
        describe_run(model, lora, SFTConfig(str(tmp_path), **COMMON))
    # by the names that a YAML has
    for name in ("max_length", "per_device_train_batch_size"):
        training = SFTConfig(str(tmp_path), **COMMON)
        setattr(training, name, 0)
        with pytest.raises(ConfigError, match=f"^{name} is 0, expected an integer of at least 1"):
            describe_run(model, LoraArguments(), training)
    with pytest.raises(ConfigError, match="bf16"):
        describe_run(model, LoraArguments(), SFTConfig(str(tmp_path), **{**COMMON, "bf16": True}))


def test_the_published_sizes_need_no_weights(repository):
    config = json.loads((repository / "tests/fixtures/published_config.json").read_text())
    options = LoraArguments(lora_targets=["experts"], lora_rank=1, lora_form="shared_outer")
    found = run_adapter(parse_config(config), options, 0)
    layer = 2 * (3584 + 896 * 3072) + 896 * 3072 + 3584
    assert found.by_group == {"experts": 92 * layer}
