"""A checkpoint folder is complete or not there, and says what is wrong with it."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from k3tune.errors import CheckpointError
from k3tune.train.state import (
    MARKER,
    check_checkpoint,
    new_checkpoint,
    newest_checkpoint,
    random_state,
    read_json,
    remove_leftovers,
    remove_old_checkpoints,
    restore_random_state,
    write_json,
)


def write(output_dir, step, value=0.0):
    with new_checkpoint(output_dir, step) as folder:
        (folder / "adapter").mkdir()
        save_file({"x": torch.full((8,), value)}, folder / "adapter" / "model.safetensors")
        write_json(folder / "run.json", {"step": step})
    return output_dir / f"checkpoint-{step}"


def names(output_dir):
    return sorted(entry.name for entry in output_dir.iterdir())


def test_a_checkpoint_is_complete_and_lists_its_files(tmp_path):
    folder = write(tmp_path, 5)
    check_checkpoint(folder)
    assert read_json(folder / MARKER)["files"].keys() == {"adapter/model.safetensors", "run.json"}
    assert names(tmp_path) == ["checkpoint-5"]


def test_an_error_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_checkpoint(tmp_path, 5) as folder:
        write_json(folder / "run.json", {})
        raise ZeroDivisionError
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_said_and_leaves_the_one_before(tmp_path, error):
    write(tmp_path, 4)
    said = r"checkpoint-5 cannot be written: .*No space left on device.*: make room there, or"
    with pytest.raises(CheckpointError, match=said), new_checkpoint(tmp_path, 5):
        raise error
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 5, 1.0)
    folder = write(tmp_path, 5, 2.0)
    check_checkpoint(folder)
    assert names(tmp_path) == ["checkpoint-5"]


def test_other_files_than_safetensors_and_json_are_refused(tmp_path):
    with (
        pytest.raises(CheckpointError, match="expected safetensors and JSON"),
        new_checkpoint(tmp_path, 1) as folder,
    ):
        torch.save({}, folder / "optimizer.pt")
    assert names(tmp_path) == []


def cut(folder):
    file = folder / "adapter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder):
    file = folder / "adapter" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def unmark(folder):
    (folder / MARKER).unlink()


def drop(folder):
    (folder / "run.json").unlink()


def add(folder):
    (folder / "more.json").write_text("{}")


def age(folder):
    write_json(folder / MARKER, {**read_json(folder / MARKER), "schema": 0})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "has 95 bytes, expected 96"),
        (flip, "does not have the SHA-256"),
        (unmark, "never finished"),
        (drop, "run.json is missing"),
        (add, "more.json does not belong"),
        (age, "has schema 0, expected 1"),
    ],
)
def test_a_damaged_newest_checkpoint_is_skipped_with_the_reason(tmp_path, caplog, damage, message):
    whole = write(tmp_path, 9)
    damage(write(tmp_path, 10))
    assert newest_checkpoint(tmp_path) == whole
    [record] = caplog.records
    assert record.levelname == "WARNING" and "checkpoint-10" in record.message
    assert message in record.message


def test_the_newest_is_the_one_of_the_highest_step(tmp_path):
    for step in (100, 20, 3):
        write(tmp_path, step)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_without_checkpoints_there_is_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


def test_the_limit_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    remove_old_checkpoints(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10", "checkpoint-3"]
    remove_old_checkpoints(tmp_path, None)
    assert len(names(tmp_path)) == 3


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(tmp_path):
    write(tmp_path, 1)
    for name in (".checkpoint-2.0123abcd", ".checkpoint-2.0123abcd.old", ".mine"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".mine", "checkpoint-1"]


def test_random_generators_go_on_where_they_stood():
    state = json.loads(json.dumps(random_state()))
    expected = (random.random(), random.gauss(), np.random.randn(3).tolist(), torch.rand(3))
    restore_random_state(state)
    actual = (random.random(), random.gauss(), np.random.randn(3).tolist(), torch.rand(3))
    assert actual[:3] == expected[:3]
    assert torch.equal(actual[3], expected[3])


def test_what_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"scheduler.json: .*not JSON serializable"):
        write_json(tmp_path / "scheduler.json", {"function": print})
