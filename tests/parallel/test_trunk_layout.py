"""A unit's bytes: every weight on a boundary, every byte on one rank, next to no padding."""

import pytest
import torch
from torch import nn

from k3tune.errors import ConfigError
from k3tune.model import K3Config, K3ForCausalLM
from k3tune.parallel.trunk_bytes import ALIGN
from k3tune.parallel.trunk_layout import check_not_shared, lay_out, unit_weights
from k3tune.plan.sizes import base_bytes
from k3tune.published.architecture import parse_config, read_config

# name, shape, dtype; odd sizes, and one that spans parts
WEIGHTS = [
    ("proj", (37, 53), torch.bfloat16),
    ("A_log", (5,), torch.float32),
    ("bias", (3,), torch.bfloat16),
    ("wide", (300, 7), torch.float32),
    ("last", (1,), torch.bfloat16),
]


def layout(ranks, weights=WEIGHTS):
    parameters = [
        (name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False), ())
        for name, shape, dtype in weights
    ]
    return lay_out(parameters, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
def test_every_byte_of_every_weight_is_on_exactly_one_rank(ranks):
    found = layout(ranks)
    for slot in found.slots:
        kept = [found.kept(slot, rank) for rank in range(ranks)]
        bounds = [part for part in kept if part is not None]
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])], slot.name
        assert bounds[-1][1] == slot.size_bytes
        for rank, part in enumerate(kept):
            if part is not None:
                place = slot.offset + part[0] - rank * found.part_bytes
                assert 0 <= place < place + part[1] - part[0] <= found.part_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_and_parts_start_on_boundaries_and_do_not_overlap(ranks):
    found = layout(ranks)
    assert found.part_bytes % ALIGN == 0
    end = 0
    for slot in found.slots:
        assert slot.offset % ALIGN == 0 and slot.offset >= end
        end = slot.offset + slot.size_bytes
    # the unit's number stands behind the last weight
    assert end + 8 <= found.full_bytes


def test_no_element_is_cut():
    for ranks in (2, 3, 4, 5):
        found = layout(ranks)
        for slot in found.slots:
            for rank in range(ranks):
                begin, end = found.kept(slot, rank) or (0, 0)
                assert begin % slot.dtype.itemsize == end % slot.dtype.itemsize == 0


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_shards_of_the_published_model_are_within_one_percent_of_an_even_split(fixtures, ranks):
    config = K3Config.from_pretrained(fixtures / "published_config.json")
    with torch.device("meta"):
        base = K3ForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    units = [("model.embed_tokens", base.model.embed_tokens), *base.model.layers.named_children()]
    resident = [lay_out(unit_weights(*unit), ranks).part_bytes for unit in units]

    expected = base_bytes(base.model.architecture)
    whole = expected.embedding + sum(expected.layers)
    assert whole / ranks <= sum(resident) <= 1.01 * whole / ranks
    assert resident[0] * ranks == pytest.approx(expected.embedding, rel=1e-4)
    if ranks == 8:
        assert sum(resident) / 1e9 == pytest.approx(13.9, abs=0.05)


def test_a_unit_is_all_but_packed_experts_under_its_published_names(fixtures):
    architecture = parse_config(read_config(fixtures / "k3_tiny"))
    with torch.device("meta"):
        base = K3ForCausalLM(K3Config.from_pretrained(fixtures / "k3_tiny")).requires_grad_(False)
    layer = architecture.moe_layers[0]
    found = {name for name, _, _ in unit_weights(f"model.layers.{layer}", base.model.layers[layer])}
    every = {name for name, _ in base.named_parameters() if f".layers.{layer}." in name}
    assert found == {name for name in every if not name.endswith((".packed", ".scale"))}


def test_a_weight_to_be_trained_is_refused():
    with pytest.raises(ConfigError, match=r"layer\.weight requires a gradient, expected frozen"):
        unit_weights("layer", nn.Linear(2, 2))


def test_a_weight_shared_inside_a_unit_has_one_place():
    unit = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    unit[1].weight = unit[0].weight
    [(name, _, owners)] = unit_weights("unit", unit.requires_grad_(False))
    assert name == "unit.0.weight"
    assert [owner.module for owner in owners] == list(unit)


def test_a_weight_shared_with_the_rest_of_the_model_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    weights = unit_weights("embed", model["embed"].requires_grad_(False))
    with pytest.raises(ConfigError, match=r"embed\.weight is shared with another part .* untie it"):
        check_not_shared(model, weights)
