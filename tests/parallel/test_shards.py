"""Which rank holds which experts, and what an exchange costs: arithmetic alone."""

import json

import pytest

from checkpoints import make_config
from k3tune.errors import ConfigError
from k3tune.parallel.shards import (
    ExpertShards,
    expected_ranks_per_token,
    expert_bytes,
    layer_traffic,
    row_bytes,
    shard_bytes,
)
from k3tune.published.architecture import parse_config

K3 = ExpertShards(896, 32)


@pytest.mark.parametrize(("experts", "ranks"), [(896, 32), (7, 2), (7, 4), (5, 5), (6, 1)])
def test_ranks_share_all_experts_as_evenly_as_they_can(experts, ranks):
    shards = ExpertShards(experts, ranks)
    held = [shards.experts(rank, 1) for rank in range(ranks)]
    assert [e for part in held for e in part] == list(range(experts))
    assert [len(part) for part in held] == list(shards.sizes)
    assert max(shards.sizes) - min(shards.sizes) <= 1
    assert all(shards.ranks(1)[e] == rank for rank, part in enumerate(held) for e in part)


def test_placed_layers_differ_and_the_others_do_not():
    shards = ExpertShards(4, 2, {3: (1, 0, 0, 1)})
    assert [shards.experts(rank, 3) for rank in (0, 1)] == [(1, 2), (0, 3)]
    assert [shards.experts(rank, 2) for rank in (0, 1)] == [(0, 1), (2, 3)]
    assert shards.ranks(3) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({1: (0, 1)}, "layer 1 places 2 experts, expected 4"),
        ({1: (0, 0, 1, 2)}, "on rank 2, expected 0 to 1"),
        ({1: (0, 0, 0, 1)}, r"layer 1 places \[3, 1\] experts on the ranks, expected \[2, 2\]"),
    ],
)
def test_an_assignment_that_ranks_have_no_room_for_is_refused(placed, message):
    with pytest.raises(ConfigError, match=message):
        ExpertShards(4, 2, placed)


@pytest.mark.parametrize("ranks", [0, 5])
def test_every_rank_holds_an_expert(ranks):
    with pytest.raises(ConfigError, match=f"expert_parallel_size is {ranks}, expected 1 to 4"):
        ExpertShards(4, ranks)


def test_shards_come_back_from_their_file(tmp_path):
    shards = ExpertShards(4, 2, {3: (1, 0, 0, 1)})
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(shards.to_json()))
    assert ExpertShards.read(file) == shards
    file.write_text(json.dumps({**shards.to_json(), "format": 2}))
    with pytest.raises(ConfigError, match=r"placement.json: a placement of format 2, expected 1"):
        ExpertShards.read(file)
    file.write_text('{"format": 1}')
    with pytest.raises(ConfigError, match=r"placement.json: a placement with format, expected"):
        ExpertShards.read(file)
    with pytest.raises(ConfigError, match="cannot read the placement"):
        ExpertShards.read(tmp_path / "missing.json")


def test_bytes_of_a_rank_are_its_part_of_the_packed_tensors():
    architecture = parse_config(make_config(num_experts=7, num_experts_per_token=3))
    latent, width = architecture.routed_expert_hidden_size, architecture.moe_intermediate_size
    assert expert_bytes(architecture) == 3 * latent * width * 17 // 32
    shards = ExpertShards(7, 2)
    total = sum(shard_bytes(architecture, shards, rank) for rank in (0, 1))
    assert total == 7 * len(architecture.moe_layers) * expert_bytes(architecture)
    assert shard_bytes(architecture, shards, 0) * 7 == total * 3


def test_a_k3_token_costs_sixteen_latents_a_way_and_less_deduplicated():
    assert (row_bytes(3584, 2), row_bytes(3584, 2, mxfp8=True)) == (7168, 3696)
    plain = layer_traffic(K3, latent=3584, value_bytes=2, rows=16)
    assert (plain.dispatch, plain.combine, plain.gradients) == (16 * 7168, 16 * 7168, 32 * 7168)
    assert plain.counts == 32 * 28 * 8
    assert plain.forward == plain.counts + plain.dispatch + plain.combine
    ranks = expected_ranks_per_token(16, K3)
    assert 12.8 < ranks < 12.9
    once = layer_traffic(K3, latent=3584, value_bytes=2, rows=16, unique_rows=13)
    assert once.dispatch == 13 * 7168 + 16 * 4
    assert once.gradients == plain.gradients - 3 * 7168
    assert (plain.messages, once.messages) == (5 * 31, 6 * 31)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts": 4.9},
        {"num_ranks": "2"},
        {"num_ranks": 10**12, "num_experts": 10**12},
        {"ranks": {"01": [0, 0, 1, 1]}},
        {"ranks": {"one": [0, 0, 1, 1]}},
        {"ranks": {"1": 5}},
        {"ranks": None},
    ],
)
def test_a_file_that_holds_no_placement_is_refused(wrong):
    content = {"format": 1, "num_experts": 4, "num_ranks": 2, "ranks": {"1": [0, 1, 0, 1]}}
    ExpertShards.from_json(content)
    with pytest.raises(ConfigError, match="expected format, num_experts, num_ranks and ranks"):
        ExpertShards.from_json(content | wrong)
