"""Index, files and folder against each other: what is missing, doubled, left over or of no use."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import build_checkpoint
from k3tune.errors import CheckpointError
from k3tune.model.checkpoint import load_base
from k3tune.published.inspection import inspect_checkpoint, render_inspection
from k3tune.published.safetensors_files import read_header
from k3tune.published.survey import survey_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
INDEX = "model.safetensors.index.json"
TOWER = "model-00007-of-000007.safetensors"
OTHER = "model-00008-of-000008.safetensors"
TEXT = "language_model.model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return build_checkpoint(tmp_path)


def _edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def _problems(folder):
    problems = survey_checkpoint(folder).problems
    if problems:
        with pytest.raises(CheckpointError) as caught:
            load_base(folder)
        assert str(caught.value).startswith(problems[0])
    return problems


@pytest.mark.parametrize("fixture", ["k3_tiny", "k3_tiny_shared_outer"])
def test_the_golden_checkpoints_have_no_problem_and_two_files_beside_them(fixture):
    survey = survey_checkpoint(FIXTURES / fixture)
    assert survey.problems == []
    assert survey.ignored_files == ["golden.safetensors", "lora_grads.safetensors"]


@pytest.mark.parametrize("change", [-1, 1, 10**400])
def test_a_total_size_other_than_the_sum_of_the_headers_is_a_problem(folder, change):
    total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    _edit_index(folder, lambda index: index["metadata"].update(total_size=total + change))
    [problem] = _problems(folder)
    assert f"expected tensors of {total + change} bytes in all" in problem
    assert f"found {total}: index and files are not of one download, so download both" in problem


@pytest.mark.parametrize("absent", ["tower", "total_size", "metadata"])
def test_a_sum_that_cannot_be_known_is_not_judged(folder, absent):
    if absent == "tower":
        _edit_index(folder, lambda index: index["metadata"].update(total_size=5))
        (folder / TOWER).unlink()
    elif absent == "total_size":
        _edit_index(folder, lambda index: index["metadata"].clear())
    else:
        _edit_index(folder, lambda index: index.pop("metadata"))
    assert _problems(folder) == []


def test_a_total_size_written_as_a_float_is_taken(folder):
    _edit_index(
        folder, lambda i: i["metadata"].update(total_size=float(i["metadata"]["total_size"]))
    )
    assert _problems(folder) == []


@pytest.mark.parametrize("total", ["12", [], True], ids=str)
def test_a_total_size_that_is_no_number_is_refused(folder, total):
    _edit_index(folder, lambda index: index["metadata"].update(total_size=total))
    with pytest.raises(
        CheckpointError, match=r"expected metadata\.total_size .* download it again"
    ):
        survey_checkpoint(folder)


@pytest.mark.parametrize("name", [OTHER, "model-old.safetensors", "model.safetensors"])
def test_text_weights_the_index_does_not_name_are_a_problem(folder, name):
    save_file({TEXT: torch.zeros(3), "other": torch.zeros(1)}, folder / name)
    [problem] = _problems(folder)
    assert problem.startswith(f"{folder / name}: extra text tensor {TEXT} (one of 2): expected no")
    assert "remove it, or download" in problem


def test_shards_beside_the_one_file_without_an_index_are_a_problem(tmp_path):
    build_checkpoint(tmp_path, single=True)
    save_file({TEXT: torch.zeros(3)}, tmp_path / OTHER)
    [problem] = _problems(tmp_path)
    assert "extra text tensor" in problem and OTHER in problem


def test_other_files_are_ignored_and_said_to_be(folder):
    save_file({"vision_tower.a": torch.zeros(3)}, folder / OTHER)
    save_file({TEXT: torch.zeros(3)}, folder / "adapter_model.safetensors")
    (folder / "model-damaged.safetensors").write_bytes(b"")
    (folder / "README.md").write_text("no weights")
    ignored = ["adapter_model.safetensors", OTHER, "model-damaged.safetensors"]
    assert _problems(folder) == []
    assert load_base(folder).load_report.ignored_files == tuple(ignored)
    text = render_inspection(inspect_checkpoint(folder))
    assert (
        f"3 other safetensors files are no part of the checkpoint and not read: {ignored}" in text
    )


@pytest.mark.parametrize(
    "file",
    [
        "a" * 300 + ".safetensors",
        "\u00e9" * 130 + ".safetensors",
        "a\0b.safetensors",
        "a\nb.safetensors",
        ".safetensors/",
        "x.txt",
    ],
    ids=ascii,
)
def test_an_index_naming_what_no_file_is_called_is_refused(folder, file):
    _edit_index(folder, lambda index: index["weight_map"].update({TEXT: file}))
    with pytest.raises(CheckpointError, match="expected names of safetensors files") as caught:
        survey_checkpoint(folder)
    assert str(caught.value).endswith("download it again") and str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a" * 5000, "a\nb"], ids=["endless", "two_lines"])
def test_an_index_with_a_name_no_sentence_can_quote_is_refused(folder, name):
    _edit_index(folder, lambda index: index["weight_map"].update({name: TOWER}))
    with pytest.raises(CheckpointError, match="expected printable names") as caught:
        survey_checkpoint(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_an_index_with_half_a_character_is_refused(folder):
    _edit_index(folder, lambda index: index["weight_map"].update({TEXT: "\ud800.safetensors"}))
    with pytest.raises(CheckpointError, match="does not parse") as caught:
        survey_checkpoint(folder)
    str(caught.value).encode()


def test_a_folder_that_cannot_be_listed_is_a_sentence(folder, monkeypatch):
    def fail(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\): check its"):
        survey_checkpoint(folder)


def test_every_problem_says_what_to_do(folder):
    second = folder / "model-00002-of-000007.safetensors"
    weights = {name: torch.zeros(3) for name in read_header(second)}
    save_file(weights | {TEXT: torch.zeros(64), "stray": torch.zeros(1)}, second)
    _edit_index(folder, lambda index: index["weight_map"].pop("language_model.lm_head.weight"))
    (folder / "model-00001-of-000007.safetensors").write_bytes(b"\0" * 20)
    problems = survey_checkpoint(folder).problems
    assert len(problems) == 15
    for problem in problems:
        assert ("expected" in problem and "found" in problem) or "more tensors like" in problem
        assert "download" in problem or "more tensors like" in problem, problem
