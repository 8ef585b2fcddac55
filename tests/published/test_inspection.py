"""What ``k3tune inspect`` counts, and what it takes for a problem."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import ODD_SHAPES, build_checkpoint, make_config, make_weights, write_checkpoint
from k3tune.errors import CheckpointError, ConfigError
from k3tune.published.architecture import parse_config
from k3tune.published.inspection import inspect_checkpoint, inspection_json, render_inspection
from k3tune.published.tensor_table import GROUPS, is_vision, text_tensors, vision_tensors

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parents[1] / "fixtures"
INDEX = "model.safetensors.index.json"
GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"


def _inspect(folder):
    return inspection_json(inspect_checkpoint(folder))


def _without_weights(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def _edit_json(file, edit):
    table = json.loads(file.read_text())
    edit(table)
    file.write_text(json.dumps(table))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The published config with an index generated from it."""
    folder = tmp_path_factory.mktemp("published")
    config = json.loads((FIXTURES / "published_config.json").read_text())
    names = [*text_tensors(parse_config(config)), *vision_tensors(config["vision_config"])]
    weight_map = {name: "model-00001-of-000096.safetensors" for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return inspect_checkpoint(folder)


def test_published_sizes(published):
    report = inspection_json(published)
    assert report["text_parameters"] == 2_779_484_478_208
    assert report["tensors"] == 497_220
    assert report["bytes"] == 1_560_860_324_864
    assert report["parameters"] == 2_779_931_837_184
    assert report["problems"] == []
    assert report["groups"]["vision"] == {"parameters": 447_358_976, "bytes": 894_717_952}


def test_published_text_report_has_layers_active_experts_and_verdict(published):
    text = render_inspection(published)
    for part in (
        "93 layers: 69 KDA + 24 MLA, 1 dense + 92 MoE",
        "weights: absent",
        "16 of 896 routed experts and 2 shared",
        "48,620,371,968 of 2,722,740,830,208",
        "104,189,614,848",
        "494,592",
        "verdict: the names are what config.json asks for",
    ):
        assert part in text, text


def test_published_config_alone_gives_the_same_sizes(tmp_path, published):
    (tmp_path / "config.json").write_bytes((FIXTURES / "published_config.json").read_bytes())
    alone = inspect_checkpoint(tmp_path)
    assert inspection_json(alone) == inspection_json(published)
    assert "no index or weight to judge" in render_inspection(alone)


def test_json_keys_are_fixed(published):
    report = inspection_json(published)
    keys = {"text_parameters", "parameters", "tensors", "bytes", "groups", "problems"}
    assert report.keys() == keys
    assert tuple(report["groups"]) == GROUPS
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("single", [False, True], ids=["sharded", "one_file"])
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_stored_tensors_are_counted_as_stored(tmp_path, shape, single):
    config = make_config(**ODD_SHAPES[shape])
    weights = make_weights(config, a_log_padding=11)
    report = _inspect(write_checkpoint(tmp_path, config, weights, single=single))
    text = 0
    for name, tensor in weights.items():
        if not is_vision(name) and not name.endswith("scale"):
            text += tensor.numel() * (2 if name.endswith("packed") else 1)
    assert report["text_parameters"] == text
    assert report["parameters"] == text + 16
    assert report["tensors"] == len(weights)
    assert report["bytes"] == sum(tensor.nbytes for tensor in weights.values())
    assert sum(group["bytes"] for group in report["groups"].values()) == report["bytes"]
    assert report["problems"] == []


def test_without_weights_a_log_counts_head_dim_entries(tmp_path):
    stored = _inspect(build_checkpoint(tmp_path, kda_num_heads=3, a_log_padding=0))
    absent = _inspect(_without_weights(tmp_path))
    assert absent["problems"] == []
    assert absent["text_parameters"] - stored["text_parameters"] == 3 * (16 - 3)


def test_image_tower_tensors_of_unknown_size_are_counted_and_no_problem(tmp_path):
    folder = _without_weights(build_checkpoint(tmp_path))
    report = _inspect(folder)
    assert report["groups"]["vision"] == {"parameters": 0, "bytes": 0}
    assert report["tensors"] == 2 + len(text_tensors(parse_config(make_config())))
    assert report["problems"] == []
    assert "2 tensors have unknown sizes" in render_inspection(inspect_checkpoint(folder))


@pytest.mark.parametrize("damage", ["missing", "truncated", "renamed"])
def test_nothing_about_the_image_tower_is_a_problem(tmp_path, damage):
    build_checkpoint(tmp_path)
    tower = tmp_path / "model-00007-of-000007.safetensors"
    if damage == "missing":
        tower.unlink()
    elif damage == "truncated":
        tower.write_bytes(b"")
    else:
        save_file({"vision_tower.other": torch.zeros(3)}, tower)
    assert _inspect(tmp_path)["problems"] == []


def test_a_missing_shard_is_a_problem_when_others_are_there(tmp_path):
    build_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-000007.safetensors").unlink()
    (tmp_path / "model-00005-of-000007.safetensors").unlink()
    problems = _inspect(tmp_path)["problems"]
    assert [problem.count("found no such file") for problem in problems] == [1, 1]
    assert "model-00002-of-000007.safetensors: expected a shard with 64" in problems[0]
    text = render_inspection(inspect_checkpoint(tmp_path))
    assert "verdict: 2 problems" in text and problems[1] in text


def test_each_problem_is_listed_once(tmp_path):
    build_checkpoint(tmp_path)
    second = tmp_path / "model-00002-of-000007.safetensors"
    weights = load_file(second)
    weights[GATE] = weights[GATE].float()
    weights["language_model.extra"] = torch.zeros(3)
    save_file(weights, second)
    (tmp_path / "model-00001-of-000007.safetensors").write_bytes(b"\0" * 20)
    first, unlisted, dtype = _inspect(tmp_path)["problems"]
    assert "model-00001" in first and "expected a safetensors header" in first
    assert "tensor language_model.extra" in unlisted and "found only in the file" in unlisted
    assert f"tensor {GATE}" in dtype and "found F32 [6, 64]" in dtype


@pytest.mark.parametrize("with_weights", [True, False])
def test_names_are_judged_with_and_without_weights(tmp_path, with_weights):
    build_checkpoint(tmp_path)
    _edit_json(tmp_path / "config.json", lambda c: c["text_config"].update(num_experts=8))
    if not with_weights:
        _without_weights(tmp_path)
    problems = _inspect(tmp_path)["problems"]
    assert "experts.6.w1.weight_packed: expected by config.json as U8 [32, 16]" in problems[0]
    assert problems[10] == f"{3 * 2 * 6 - 10} more tensors like the last"


def test_unexpected_tensors_have_their_own_group(tmp_path):
    build_checkpoint(tmp_path)
    _edit_json(tmp_path / INDEX, lambda i: i["weight_map"].update({"bias": "x.safetensors"}))
    report = _inspect(_without_weights(tmp_path))
    assert "unexpected" in report["groups"]
    assert len(report["problems"]) == 1 and "tensor bias: expected only" in report["problems"][0]


def test_a_config_that_is_not_k3_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
    with pytest.raises(ConfigError, match=r"lacks fields of Kimi K3: vocab_size"):
        inspect_checkpoint(tmp_path)


def test_a_broken_index_is_refused(tmp_path):
    build_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="does not parse"):
        inspect_checkpoint(tmp_path)


def test_inspecting_imports_no_torch():
    code = "import sys, k3tune.published.inspection; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
