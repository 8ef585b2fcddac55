"""The run's log survives being killed, and its reader says what it dropped."""

import json
import os

import pytest

from k3tune.errors import K3TuneError
from k3tune.run_log import SCHEMA, RunLogWriter, read_run_log


@pytest.fixture
def log(tmp_path):
    return tmp_path / "run_log.jsonl"


def write(log, *records):
    writer = RunLogWriter(log)
    for kind, step, values in records:
        writer.write(kind, step, values)
    writer.close()


def test_a_full_disk_is_one_sentence(log, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = RunLogWriter(log)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(K3TuneError, match=r"cannot write .*: No space left on device: make room"):
        writer.write("run", 0, {})


def test_records_come_back_with_schema_kind_time_and_step(log):
    write(log, ("run", 0, {}), ("train", 1, {"loss": 2.5}))
    run, train = read_run_log(log).records
    assert (train["schema"], train["kind"], train["step"], train["loss"]) == (
        SCHEMA,
        "train",
        1,
        2.5,
    )
    assert run["time"] <= train["time"]


def test_the_folder_of_the_run_names_its_log(log):
    write(log, ("run", 0, {}))
    assert read_run_log(log.parent) == read_run_log(log)


def test_numbers_that_json_does_not_have_become_null(log):
    write(log, ("train", 1, {"loss": float("nan"), "grad_norm": float("inf"), "mfu": None}))
    [record] = read_run_log(log).records
    assert (record["loss"], record["grad_norm"], record["mfu"]) == (None, None, None)


def test_a_cut_last_line_is_reported_and_the_rest_read(log):
    write(log, ("run", 0, {}), ("train", 1, {"loss": 1.0}))
    whole = log.read_bytes()
    log.write_bytes(whole[:-7])
    read = read_run_log(log)
    assert [record["kind"] for record in read.records] == ["run"]
    assert read.cut_line == whole.splitlines()[1][:-6].decode()


def test_a_writer_goes_on_after_a_cut_line(log):
    write(log, ("run", 0, {}), ("train", 1, {}))
    log.write_bytes(log.read_bytes()[:-7])
    write(log, ("run", 0, {}), ("train", 1, {}))
    read = read_run_log(log)
    assert [record["kind"] for record in read.records] == ["run", "run", "train"]
    assert read.cut_line is None


def test_a_log_that_is_one_cut_line_begins_anew(log):
    log.write_bytes(b'{"sche')
    write(log, ("run", 0, {}))
    assert len(read_run_log(log).records) == 1


def test_work_that_was_done_again_is_dropped_and_counted(log):
    steps = [("train", step, {"loss": float(step)}) for step in range(1, 6)]
    write(log, ("run", 0, {}), *steps)
    write(log, ("run", 3, {"resumed_from": "checkpoint-3"}), ("train", 4, {"loss": 40.0}))
    read = read_run_log(log)
    assert [record["loss"] for record in read.of_kind("train")] == [1.0, 2.0, 3.0, 40.0]
    assert read.num_superseded == 2


def test_each_record_is_one_write(log, monkeypatch):
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or real(file, data))
    write(log, ("train", 1, {"loss": 1.0}), ("train", 2, {"loss": 1.0}))
    assert [json.loads(line)["step"] for line in writes] == [1, 2]
    assert all(line.endswith(b"\n") for line in writes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 1 is no JSON"),
        (b"[1]", "line 1 is no record"),
        (b'{"kind": "run"}', "line 1 is no record"),
        (b'{"schema": 2, "kind": "run", "step": 0}', "has schema 2, expected 1"),
    ],
)
def test_a_damaged_line_before_the_last_is_named(log, line, message):
    log.write_bytes(line + b"\n" + line)
    with pytest.raises(K3TuneError, match=message):
        read_run_log(log)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(K3TuneError, match="cannot read the run log"):
        read_run_log(tmp_path)
