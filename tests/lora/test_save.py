"""What is saved is a standard PEFT directory, read back to the same model, whole or not there."""

import json
import math
import os

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file

from k3tune.errors import AdapterError
from k3tune.lora import adapter_state, attach_lora, load_adapter, save_adapter
from k3tune.lora.fingerprint import base_fingerprint
from k3tune.model import load_base

PREFIX = "base_model.model.language_model.model.layers."
MIXED = {
    "rank_pattern": {"o_proj": 5, "experts.w2": 3, r"layers\.2\..*w1": 1},
    "alpha_pattern": {r"layers\.1\..*": 12, "w3": 2.5},
    "use_rslora": True,
}


@pytest.fixture
def load(folder):
    return lambda **options: load_base(
        folder, **{"dtype": torch.float32, "kernels": "reference", **options}
    )


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("fields", [{}, MIXED, {"layers": [1]}], ids=["plain", "mixed", "subset"])
@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_a_saved_adapter_is_the_same_adapter(load, spec, ids, randomise, tmp_path, form, fields):
    targets = ("attention", "latent", "experts", "shared_experts")
    model = randomise(attach_lora(load(), spec(targets=targets, form=form, **fields)))
    path = save_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    again = load_adapter(load(), path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    before, after = adapter_state(model), adapter_state(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_loading_what_was_saved_is_silent(load, spec, tmp_path, caplog):
    # a subset of layers and mixed ranks: the config must name exactly these
    model = attach_lora(load(), spec(layers=[0, 2], **MIXED | {"alpha_pattern": {"w3": 2.5}}))
    load_adapter(load(), save_adapter(model, tmp_path / "adapter"))
    assert not caplog.records


def test_the_files(load, spec, randomise, tmp_path):
    base = load()
    model = attach_lora(base, spec(rank_pattern={"w2": 3}, form="shared_outer"))
    path = save_adapter(
        randomise(model), tmp_path / "x" / "adapter", version=7, provenance={"run": 1}
    )
    names = ["adapter_config.json", "adapter_model.safetensors", "k3tune.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}
        assert file.metadata() == {"format": "pt"}
    experts = f"{PREFIX}1.block_sparse_moe.experts."
    assert shapes[f"{experts}w1.lora_A.weight"] == [1, 2, 32]
    assert shapes[f"{experts}w1.lora_B.weight"] == [5, 64, 2]
    assert shapes[f"{experts}w2.lora_A.weight"] == [5, 3, 64]
    assert shapes[f"{experts}w2.lora_B.weight"] == [1, 32, 3]
    assert shapes[f"{PREFIX}0.self_attn.q_proj.lora_A.weight"] == [2, 48]
    # 35 modules, an A and a B each
    assert len(shapes) == 70
    config = LoraConfig.from_pretrained(path)
    assert (config.r, config.lora_alpha, config.rank_pattern) == (2, 6, {"w2": 3})
    assert {"q_proj", "w1", "w2", "w3", "gate_proj"} <= config.target_modules
    assert config.task_type == "CAUSAL_LM" and config.inference_mode
    metadata = json.loads((path / "k3tune.json").read_text())
    assert metadata["form"] == "shared_outer" and metadata["version"] == 7
    assert metadata["provenance"] == {"run": 1}
    assert metadata["base"]["fingerprint"] == base_fingerprint(load())


def test_bf16_rounds_and_fp32_does_not(load, spec, randomise, tmp_path):
    model = randomise(attach_lora(load(), spec(targets=["latent"])))
    rounded = load_file(save_adapter(model, tmp_path / "a") / "adapter_model.safetensors")
    exact = save_adapter(model, tmp_path / "b", dtype=torch.float32) / "adapter_model.safetensors"
    for key, value in adapter_state(model).items():
        assert torch.equal(rounded[key], value.bfloat16())
        assert torch.equal(load_file(exact)[key], value)


def test_a_large_adapter_is_sharded_with_an_index(load, spec, ids, randomise, tmp_path):
    model = randomise(attach_lora(load(), spec()))
    options = {"dtype": torch.float32, "shard_bytes": 20_000}
    path = save_adapter(model, tmp_path / "adapter", **options)
    index = json.loads((path / "adapter_model.safetensors.index.json").read_text())
    shards = sorted(path.glob("adapter_model-*.safetensors"))
    assert len(shards) > 2 and shards[0].name.endswith(f"-00001-of-{len(shards):05d}.safetensors")
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
        assert all(index["weight_map"][key] == shard.name for key in tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in adapter_state(model).values())
    assert torch.equal(logits(load_adapter(load(), path), ids), logits(model, ids))


def test_nothing_is_overwritten_unless_told(load, spec, tmp_path):
    model = attach_lora(load(), spec(targets=["latent"]))
    path = save_adapter(model, tmp_path / "adapter", version=1)
    with pytest.raises(AdapterError, match=r"adapter exists: .*overwrite=True"):
        save_adapter(model, path, version=2)
    save_adapter(model, path, version=3, overwrite=True)
    assert json.loads((path / "k3tune.json").read_text())["version"] == 3
    assert os.listdir(tmp_path) == ["adapter"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with pytest.raises(AdapterError, match="home exists and is no adapter"):
        save_adapter(model, tmp_path / "home", overwrite=True)


def test_a_failed_save_leaves_nothing_and_keeps_what_was_there(load, spec, tmp_path):
    model = attach_lora(load(), spec(targets=["latent"]))
    path = save_adapter(model, tmp_path / "adapter", version=1)
    base = model.get_base_model().model.layers[1].block_sparse_moe
    with torch.no_grad():
        base.routed_expert_up_proj.lora_B["default"].weight[3, 1] = math.inf
    with pytest.raises(
        AdapterError, match=r"up_proj.lora_B.weight: expected finite .* found 1 that"
    ):
        save_adapter(model, path, version=2, overwrite=True)
    assert os.listdir(tmp_path) == ["adapter"]
    assert json.loads((path / "k3tune.json").read_text())["version"] == 1


def test_the_chosen_adapter_is_saved(load, spec, tmp_path):
    model = attach_lora(load(), spec())
    attach_lora(model, spec(targets=["latent"], rank=3), adapter_name="second")
    path = save_adapter(model, tmp_path / "adapter", adapter_name="second")
    assert LoraConfig.from_pretrained(path).r == 3
    assert (
        load_file(path / "adapter_model.safetensors").keys()
        == adapter_state(model, "second").keys()
    )


def test_a_part_of_the_experts_is_not_an_adapter(load, spec, tmp_path):
    whole = save_adapter(attach_lora(load(), spec()), tmp_path / "whole")
    part = load_adapter(load(experts=[1, 3]), whole)
    with pytest.raises(AdapterError, match="holds 2 of 5 experts, expected all of them"):
        save_adapter(part, tmp_path / "part")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": -1}, "version is -1, expected an integer of at least 0"),
        ({"dtype": torch.int8}, "dtype is torch.int8, expected one of torch.bfloat16"),
        ({"provenance": {"model": object()}}, "expected a mapping that JSON can hold"),
        ({"shard_bytes": 0}, "shard_bytes is 0, expected a number above 0"),
    ],
)
def test_arguments_are_checked(load, spec, tmp_path, options, message):
    with pytest.raises(AdapterError, match=message):
        save_adapter(attach_lora(load(), spec(targets=["latent"])), tmp_path / "adapter", **options)
