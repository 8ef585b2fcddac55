"""Logs in every state a run can leave them in."""

import json

import numpy as np
import pytest
from synthetic_logs import BEGUN, STEP_S, Scenario, grpo_records, sft_records, write_run

import k3tune.monitor.record
from k3tune.errors import K3TuneError
from k3tune.report.curves import CURVES
from k3tune.report.reading import MISMATCH_FIELDS, WINDOW, WORST_STEPS, read_run, status
from k3tune.run_log import RunLogWriter, read_run_log


def test_columns_hold_what_the_records_say(tmp_path):
    records = grpo_records(Scenario(steps=30))
    run = read_run(write_run(tmp_path, records))
    for columns, kind, name in ((run.train, "train", "reward"), (run.mismatch, "mismatch", "k3")):
        of_kind = [record for record in records if record["kind"] == kind]
        assert columns.steps.tolist() == [record["step"] for record in of_kind]
        assert columns[name].tolist() == [record[name] for record in of_kind]
    assert np.isnan(run.train["mfu"]).all() and "mfu" not in run.train.names()
    assert run.train.names("reward/") == ["reward/correct", "reward/format"]
    assert run.mismatch.texts["verdict"] == ["at floor"] * 30
    canary = [r["canary"]["engine_moved"] for r in records if r["kind"] == "mismatch"]
    assert run.mismatch["canary_engine_moved"].tolist() == canary


def test_fields_the_plots_use_are_read_and_documented_by_the_monitor():
    used = {
        part if place == 0 or "_limit" in part else ""
        for spec in CURVES
        if spec.source == "mismatch"
        for name, _ in spec.fields
        for place, part in enumerate(name.split("/"))
    }
    assert used - {""} <= set(MISMATCH_FIELDS)
    documented = k3tune.monitor.record.__doc__
    for name in MISMATCH_FIELDS:
        assert name.removeprefix("canary_") in documented, name


def test_what_the_log_writer_writes_is_read(tmp_path):
    writer = RunLogWriter(tmp_path / "run_log.jsonl")
    writer.write("train", 1, {"loss": float("nan"), "learning_rate": 1e-3})
    writer.write("worst", 1, {"tokens": []})
    writer.write("train", 2, {"loss": 0.5, "learning_rate": 1e-3})
    writer.close()
    run = read_run(tmp_path)
    assert run.train.steps.tolist() == [1, 2]
    assert np.isnan(run.train["loss"][0]) and run.train["loss"][1] == 0.5
    assert [record["step"] for record in run.worst] == [1]


def test_a_truncated_log_loses_its_last_line_and_says_so(tmp_path):
    records = grpo_records(Scenario(steps=10, end=None))
    run = read_run(write_run(tmp_path, records, cut=True))
    assert len(run.mismatch) == 10 and len(run.train) == 9
    assert run.notes == ["The last line of the log is cut short and was left out."]


def test_an_empty_log_is_no_error(tmp_path):
    run = read_run(write_run(tmp_path, []))
    assert status(run) == ("empty", "nothing logged yet")
    assert (len(run.train), run.floor, run.worst, run.notes) == (0, None, [], [])


def test_damaged_lines_are_skipped_counted_and_named(tmp_path):
    folder = write_run(tmp_path, sft_records(steps=10))
    lines = (folder / "run_log.jsonl").read_text().splitlines()
    lines[3:3] = ["\x00\x00\x00", '{"schema": 1, "kind": "train"}', "[]", "[" * 5000]
    lines.insert(0, '{"schema": 2, "kind": "train", "step": 1, "loss": 9}')
    (folder / "run_log.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert len(run.train) == 10
    assert "4 damaged lines were left out, the first is line 5." in run.notes
    assert "1 records of another schema than 1 were left out." in run.notes


def test_steps_done_again_after_a_resume_count_once_as_for_the_other_reader(tmp_path):
    first = grpo_records(Scenario(steps=20, fault="temperature", fault_step=15, end=None))
    again = grpo_records(Scenario(steps=25, seed=5))[2:]
    resumed = {"schema": 1, "kind": "run", "time": BEGUN + 60, "step": 12, "resumed_from": "c-12"}
    records = [*first, resumed, *(record for record in again if record["step"] > 12)]
    run = read_run(write_run(tmp_path, records))
    expected = read_run_log(tmp_path)
    for columns, kind in ((run.train, "train"), (run.mismatch, "mismatch")):
        assert columns.steps.tolist() == [record["step"] for record in expected.of_kind(kind)]
    assert run.train["reward"].tolist() == [r["reward"] for r in expected.of_kind("train")]
    assert run.alarms == [] and "16 records were left out" in run.notes[0]
    assert [record["step"] for record in run.distributions] == list(range(1, 26))


def test_a_run_that_crashed_is_told_from_one_that_goes_on(tmp_path):
    run = read_run(write_run(tmp_path, grpo_records(Scenario(steps=10, end=None))))
    last = BEGUN + 10 * STEP_S
    assert status(run, now=last + 30) == ("running", "running, last record 30 s ago")
    word, sentence = status(run, now=last + 3 * 3600)
    assert word == "stopped" and sentence == "no end record, and silent for 3 h: crashed or killed"


@pytest.mark.parametrize("reason", ["finished", "terminated"])
def test_a_run_that_ended_says_how(tmp_path, reason):
    run = read_run(write_run(tmp_path, grpo_records(Scenario(steps=3, end=reason))))
    assert status(run, now=BEGUN + 1e6)[0] == reason


def test_values_that_are_no_numbers_do_no_harm(tmp_path):
    records = sft_records(steps=6)
    records[2] |= {"loss": "high", "grad_norm": [1, 2], "entropy": {"a": 1}}
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run_log.jsonl").write_text(text.replace('"epoch": 0.03', '"epoch": 1e999'))
    run = read_run(tmp_path)
    assert np.isnan(run.train["loss"]).sum() == 1
    assert np.isnan(run.train["grad_norm"]).sum() == 1


def test_only_the_worst_steps_and_the_last_are_kept(tmp_path):
    records = grpo_records(Scenario(steps=60))
    run = read_run(write_run(tmp_path, records))
    largest = {r["step"]: r["abs_max"] for r in records if r["kind"] == "mismatch"}
    expected = set(sorted(largest, key=largest.get)[-WORST_STEPS:]) | {60}
    assert {record["step"] for record in run.worst} == expected
    assert len(run.distributions) == WINDOW


def test_options_come_from_the_config_beside_the_log(tmp_path):
    folder = write_run(tmp_path, sft_records(steps=2))
    (folder / "config.yaml").write_text("# made by a run\nlora_rank: 16\n")
    assert read_run(folder).config == {"lora_rank": 16}
    (folder / "config.yaml").write_text("lora_rank: [")
    run = read_run(folder)
    assert run.config == {} and "config.yaml cannot be read" in run.notes[0]


def test_a_floor_the_log_has_lost_comes_from_the_runs_folder(tmp_path):
    records = grpo_records(Scenario(steps=4))
    floor = next(record for record in records if record["kind"] == "floor")
    folder = write_run(tmp_path, [record for record in records if record["kind"] != "floor"])
    assert read_run(folder).floor is None
    (folder / "floor.json").write_text(json.dumps(floor))
    run = read_run(folder)
    assert run.floor["k3"] == floor["k3"] and "floor.json" in run.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the run log .*: No such file"),
        ("not a log\n", "holds no record that can be read, expected a record a line"),
        ('{"schema": 9, "kind": "run", "step": 0}\n', "expected schema 1"),
    ],
)
def test_what_is_no_log_is_one_sentence(tmp_path, text, message):
    if text is not None:
        (tmp_path / "run_log.jsonl").write_text(text)
    with pytest.raises(K3TuneError, match=message):
        read_run(tmp_path)
