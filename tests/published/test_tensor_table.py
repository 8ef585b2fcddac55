"""The expected tensors against the published sizes and against real files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from checkpoints import ODD_SHAPES, make_config
from k3tune.published.architecture import parse_config
from k3tune.published.safetensors_files import read_header, tensor_bytes
from k3tune.published.tensor_table import (
    GROUPS,
    is_vision,
    parameter_count,
    text_tensors,
    vision_tensors,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def published():
    return json.loads((FIXTURES / "published_config.json").read_text())


@pytest.fixture(scope="module")
def published_text(published):
    return text_tensors(parse_config(published))


def _bytes(table, prefix=""):
    return sum(
        tensor_bytes(spec.dtype, spec.shape)
        for name, spec in table.items()
        if name.startswith(prefix)
    )


def test_published_text_tensors_have_the_published_count_and_sizes(published_text):
    assert len(published_text) == 497_220 - 168
    parameters = sum(parameter_count(name, spec.shape) for name, spec in published_text.items())
    assert parameters == 2_779_484_478_208
    dtypes = Counter(spec.dtype for spec in published_text.values())
    assert dtypes == {"BF16": 2_122 - 168, "F32": 506, "U8": 494_592}


@pytest.mark.parametrize(
    ("layer", "count", "size"),
    [
        pytest.param(0, 23, 2_341_213_184, id="kda_dense"),
        pytest.param(1, 5_404, 16_990_092_800, id="kda_moe"),
        pytest.param(3, 5_398, 16_566_684_160, id="mla_moe"),
        pytest.param(92, 5_398, 16_566_684_160, id="last_mla_moe"),
    ],
)
def test_each_kind_of_published_layer_fills_its_file(published_text, layer, count, size):
    prefix = f"language_model.model.layers.{layer}."
    assert sum(name.startswith(prefix) for name in published_text) == count
    assert _bytes(published_text, prefix) == size


def test_published_image_tower_has_the_published_count_and_sizes(published):
    vision = vision_tensors(published["vision_config"])
    assert all(map(is_vision, vision))
    assert sum(name.startswith("vision_tower.") for name in vision) == 165
    assert _bytes(vision, "vision_tower.") == 802_428_928
    assert sum(name.startswith("mm_projector.") for name in vision) == 3
    assert _bytes(vision, "mm_projector.") == 92_289_024


@pytest.mark.parametrize(
    "vision_config",
    [None, "absent", {}, {"vt_hidden_size": 8}, {"merge_kernel_size": ["2", 2]}],
    ids=["null", "text", "empty", "partial", "unusable"],
)
def test_a_vision_config_that_tells_no_shapes_gives_no_tensors(vision_config):
    assert vision_tensors(vision_config) == {}


@pytest.mark.parametrize("fixture", ["k3_tiny", "k3_tiny_shared_outer"])
def test_the_golden_checkpoints_hold_exactly_the_expected_tensors(fixture):
    folder = FIXTURES / fixture
    expected = text_tensors(parse_config(json.loads((folder / "config.json").read_text())))
    stored = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        stored |= {n: t for n, t in read_header(file).items() if not is_vision(n)}
    assert stored.keys() == expected.keys()
    for name, spec in expected.items():
        assert stored[name].dtype == spec.dtype, name
        assert spec.accepts(stored[name].shape), (name, stored[name].shape, spec)


def test_a_log_may_be_longer_than_the_heads_and_never_shorter():
    config = make_config(kda_num_heads=5, kda_head_dim=16)
    spec = text_tensors(parse_config(config))["language_model.model.layers.0.self_attn.A_log"]
    assert spec.shape == (16,), "without a file: head_dim entries"
    assert [spec.accepts((length,)) for length in (4, 5, 6, 128)] == [False, True, True, True]
    assert not spec.accepts((5, 1))
    assert spec.describe() == "F32 [5 or more]"


def test_a_packed_byte_counts_two_parameters_and_a_scale_none():
    assert parameter_count("a.weight_packed", (3, 16)) == 96
    assert parameter_count("a.weight_scale", (3, 1)) == 0
    assert parameter_count("a.weight", (3, 16)) == 48


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_every_tensor_has_a_known_group_and_every_text_group_occurs(shape):
    table = text_tensors(parse_config(make_config(**ODD_SHAPES[shape])))
    assert {spec.group for spec in table.values()} == set(GROUPS) - {"vision"}
