"""Parameters and bytes of a base from its config: the published table, and what is loaded."""

import dataclasses
import json

import pytest
import torch

from checkpoints import ODD_SHAPES, build_checkpoint, make_config
from k3tune.model import load_base
from k3tune.model.latent_moe import PackedProjection
from k3tune.plan.planning import published_config
from k3tune.plan.sizes import PARTS, base_bytes, count_parameters
from k3tune.published.architecture import parse_config, read_config
from k3tune.published.inspection import inspect_checkpoint

# The seeds' derivation of K3's size.
PUBLISHED = {
    "routed_experts": 2_722_740_830_208,
    "latent_projections": 4_726_980_608,
    "shared_experts": 12_155_092_992,
    "embedding_and_head": 2_348_810_240,
    "attention": 36_190_795_008,
    "dense_mlp": 726_663_168,
    "vision": 447_358_976,
    "other": 595_305_984,
    "total": 2_779_931_837_184,
    "active": 104_189_614_848,
}


def test_the_published_table_is_met_to_the_digit():
    config = published_config()
    counts = count_parameters(parse_config(config), config["vision_config"])
    assert counts == PUBLISHED
    assert counts["total"] - counts["vision"] == 2_779_484_478_208
    expert = 3 * 3584 * 3072
    assert counts["routed_experts"] == expert * 896 * 92 and round(expert / 1e6, 1) == 33.0
    assert counts["latent_projections"] == 2 * 7168 * 3584 * 92


def test_the_shipped_config_has_the_sizes_of_the_published_one(fixtures):
    published = json.loads((fixtures / "published_config.json").read_text())
    assert parse_config(published_config()) == parse_config(published)
    shipped = published_config()["vision_config"]
    assert shipped == {name: published["vision_config"][name] for name in shipped}


@pytest.mark.parametrize("name", ODD_SHAPES)
def test_other_configs_give_what_inspect_counts_in_their_files(name, tmp_path):
    folder = build_checkpoint(tmp_path, **ODD_SHAPES[name])
    counted = {name: tally.parameters for name, tally in inspect_checkpoint(folder).groups.items()}
    architecture = parse_config(read_config(folder))
    found = count_parameters(architecture)
    # the file's A_log has a longer tail than the config tells
    longer = counted["attention"] - found["attention"]
    heads, width = architecture.kda_num_heads, architecture.kda_head_dim
    kda = architecture.num_hidden_layers - len(architecture.mla_layers)
    assert longer == kda * (heads + 5 - max(heads, width))
    for part in set(PARTS) - {"attention", "vision", "other"}:
        assert found[part] == counted[part]
    assert found["other"] == counted["router"] + counted["norms_and_residual_mixers"]


def test_parts_sum_to_the_total_and_experts_scale_with_their_number():
    small, large = (
        count_parameters(parse_config(make_config(num_experts=experts))) for experts in (6, 12)
    )
    assert sum(small[part] for part in PARTS) == small["total"]
    assert large["routed_experts"] == 2 * small["routed_experts"]
    # the same two experts a token; only the router has more rows
    assert large["active"] - small["active"] == 3 * 6 * (64 + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("base", ["k3-nano", "k3_tiny", "k3_tiny_shared_outer"])
def test_bytes_of_a_base_are_those_it_loads(base, dtype, repository, fixtures):
    folder = repository / "k3tune/assets/k3-nano" if base == "k3-nano" else fixtures / base
    model = load_base(folder, dtype=getattr(torch, dtype))
    found = base_bytes(parse_config(read_config(folder)), dtype)
    packed = [module for module in model.modules() if isinstance(module, PackedProjection)]
    assert found.experts == sum(p.nbytes for module in packed for p in module.parameters())
    assert found.experts + found.trunk == sum(p.nbytes for p in model.parameters())
    for layer, module in enumerate(model.model.layers):
        frozen = [p.nbytes for p in module.parameters() if p.dtype != torch.uint8]
        assert sorted(found.weights[layer]) == sorted(frozen)
    assert found.embedding == found.head == model.lm_head.weight.nbytes


def test_an_architecture_without_moe_layers_has_no_expert():
    architecture = parse_config(make_config())
    dense = dataclasses.replace(architecture, first_k_dense_replace=architecture.num_hidden_layers)
    assert base_bytes(dense).experts == count_parameters(dense)["routed_experts"] == 0
