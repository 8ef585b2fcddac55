"""A sharded trunk in one process: the same answers, weights that are only there in their layer."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch

from checkpoints import ODD_SHAPES, build_checkpoint
from k3tune.errors import AdapterError, ConfigError
from k3tune.lora import LoraSpec, attach_lora
from k3tune.lora.fingerprint import base_digests, base_fingerprint, combine_digests
from k3tune.model import load_base
from k3tune.parallel.trunk_loading import (
    load_sharded_base,
    shard_trunk,
    sharded_trunk,
    trunk_digests,
    trunk_group,
)
from k3tune.parallel.trunk_unit import TrunkError

GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")
IDS = torch.arange(22).view(2, 11) * 7


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("base"))


def adapted(base):
    model = attach_lora(base, LoraSpec(targets=GROUPS, rank=2, alpha=4))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.05, generator=generator)
    model.train().get_base_model().activation_checkpointing_enable()
    return model


def train(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(5):
        loss = model(IDS + step, labels=IDS + step, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), {n: p for n, p in model.named_parameters() if ".lora_" in n}


def test_five_steps_equal_those_of_the_whole_trunk_bit_for_bit(base_folder):
    whole = adapted(load_base(base_folder, dtype=torch.float32))
    model = adapted(load_sharded_base(base_folder, None, dtype=torch.float32))
    (losses, factors), (expected, expected_factors) = train(model), train(whole)
    assert torch.equal(losses, expected)
    for name, factor in expected_factors.items():
        assert torch.equal(factors[name], factor), name


def test_any_shape_of_k3_can_be_sharded(tmp_path):
    for name, shape in ODD_SHAPES.items():
        folder = build_checkpoint(tmp_path / name, **shape)
        model = load_sharded_base(folder, None, dtype=torch.float32)
        whole = load_base(folder, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, whole(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_reads_its_part_and_the_parts_are_the_whole(
    base_folder, monkeypatch, ranks, dtype
):
    """Ranks loaded one after the other, with no process group behind them."""
    whole = sharded_trunk(load_sharded_base(base_folder, None, dtype=dtype))
    parts, read = [], []
    for rank in range(ranks):
        group = SimpleNamespace()
        monkeypatch.setattr("torch.distributed.get_rank", lambda _, rank=rank: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda _: ranks)
        model = load_sharded_base(base_folder, group, dtype=dtype)
        parts.append(sharded_trunk(model))
        read.append(model.load_report.bytes_read)
    for name, unit in whole.units.items():
        gathered = torch.cat([shards.units[name].shard for shards in parts])
        for slot, alone in zip(parts[0].units[name].layout.slots, unit.layout.slots, strict=True):
            found = gathered[slot.offset : slot.offset + slot.size_bytes]
            expected = unit.shard[alone.offset : alone.offset + alone.size_bytes]
            assert torch.equal(found, expected), slot.name
        assert unit.tag(gathered) == unit.tag(unit.shard) == list(whole.units).index(name)
    everything = load_base(base_folder, dtype=dtype)
    # each reads experts, head and final norms, and its share of the rest
    resident = sum(p.numel() * (1 if p.dtype == torch.uint8 else 2) for p in model.parameters())
    shared = everything.load_report.bytes_read - resident
    padded = 3 * 4 * 7  # A_log of three KDA layers, 2 heads and 5 zeros, is read whole
    for found in read:
        assert found <= resident + shared / ranks * 1.05 + padded
    assert sum(read) >= ranks * resident + shared


def test_a_checkpoint_that_is_damaged_is_refused_as_ever(base_folder, tmp_path):
    folder = build_checkpoint(tmp_path, a_log_padding=0)
    assert load_sharded_base(folder, None).load_report.bytes_read > 0
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="expected"):
        load_sharded_base(folder, None)


def test_a_weight_outside_its_layer_tells_its_shape_and_refuses_the_rest(base_folder):
    model = load_sharded_base(base_folder, None)
    weight = model.model.embed_tokens.weight
    assert weight.shape == (160, 64) and len(weight) == 160 and weight.numel() == 160 * 64
    assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.is_meta
    for use in (
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: weight[0, 0].item(),
        lambda: weight.float(),
        lambda: weight.data.clone(),
        lambda: torch.equal(weight, weight),
        lambda: copy.deepcopy(model),
        lambda: torch.save(weight, io.BytesIO()),
        lambda: weight.numpy(),
        lambda: weight.data_ptr(),
    ):
        with pytest.raises(TrunkError, match=r"outside its layer.* inside sharded_trunk\(model\)"):
            use()


def test_no_cast_of_the_model_reaches_a_sharded_weight(base_folder):
    model = load_sharded_base(base_folder, None).to(torch.float16)
    with sharded_trunk(model).opened("model.layers.0"):
        attention = model.model.layers[0].self_attn
        assert attention.A_log.dtype == torch.float32
        assert attention.q_proj.weight.dtype == torch.bfloat16
    assert not [name for name in model.state_dict() if "self_attn" in name]


def test_a_layer_may_be_opened_twice_and_closes_with_the_outer(base_folder):
    model = load_sharded_base(base_folder, None)
    shards, layer = sharded_trunk(model), model.model.layers[1]
    with shards.opened("model.layers.1"):
        with torch.no_grad():
            model(IDS)
        assert layer.input_layernorm.weight.sum() != 0
    with pytest.raises(TrunkError):
        layer.input_layernorm.weight.sum()


def test_the_prefetch_guesses_forward_backward_and_the_next_forward(base_folder):
    model = adapted(load_sharded_base(base_folder, None))
    shards = sharded_trunk(model)
    train(model)
    counts = shards.take_counts()
    # five units forward, four layers again; the first unit once and each first recompute missed
    assert (counts.gathers, counts.gathers - counts.prefetched) == (5 * 9, 1 + 5)
    assert counts.received_bytes == 0
    assert counts.hit_rate == pytest.approx(39 / 45)
    assert shards.take_counts().gathers == 0


def test_fingerprint_and_refusal_of_half_a_base(base_folder):
    whole, model = load_base(base_folder), load_sharded_base(base_folder, None)
    digests = base_digests(model) | trunk_digests(sharded_trunk(model))
    assert digests == base_digests(whole)
    assert combine_digests(digests) == base_fingerprint(whole)
    with pytest.raises(AdapterError, match="trunk is sharded over processes, expected a whole one"):
        base_fingerprint(model)


def test_a_trunk_is_sharded_once_and_frozen(base_folder):
    model = load_base(base_folder)
    assert sharded_trunk(model) is None
    model.model.layers[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="requires a gradient, expected frozen weights"):
        shard_trunk(model, None)
    model.model.layers[0].requires_grad_(False)
    shards = shard_trunk(model, None)
    assert sharded_trunk(adapted(model)) is shards
    with pytest.raises(ConfigError, match="sharded already"):
        shard_trunk(model, None)


def test_sizes_of_a_trunk_group_must_divide_the_processes(monkeypatch):
    for trunk_shard in ("none", "node", "1"):
        assert trunk_group(trunk_shard) is None
    with pytest.raises(ConfigError, match=r"over 2 processes, and the run has 1: expected"):
        trunk_group("2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"trunk_shard is node, .* over 4 .* the run has 6"):
        trunk_group("node")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    with pytest.raises(ConfigError, match="sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE"):
        trunk_group("node")
