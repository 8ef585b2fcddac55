"""Floor, canary and alarms in a run: measured once, judged every step, and right about faults."""

import json
from types import MappingProxyType

import pytest
from tiny_grpo import Wrapped, make_grpo

from k3tune.arguments import MonitorArguments, RolloutArguments
from k3tune.errors import K3TuneError
from k3tune.rl import build_engine
from k3tune.run_log import read_run_log
from k3tune.train.errors import TrainingError
from tiny_run import adapted

MONITOR = MonitorArguments(floor_prompts=4, floor_samples=2)
STOP = MonitorArguments(floor_prompts=4, floor_samples=2, stop_on_alarm=True)


@pytest.fixture(scope="module")
def calibrated(base_folder, prompts_file, tmp_path_factory):
    """A clean run's folder, with its floor and canary."""
    output_dir = tmp_path_factory.mktemp("calibrated")
    make_grpo(base_folder, prompts_file, output_dir, monitor=MONITOR, max_steps=3).train()
    return output_dir


def copied(calibrated, folder):
    for name in ("floor.json", "canary.json"):
        (folder / name).write_bytes((calibrated / name).read_bytes())
    return folder


def test_a_clean_run_stays_at_the_floor(calibrated):
    log = read_run_log(calibrated)
    [floor] = log.of_kind("floor")
    print(f"floor {floor['k3']}")
    assert floor["k3"]["high"] < 1e-9 and not floor["reused"]
    assert set(name for name, part in floor["parts"].items() if part) == {
        *("same_path", "decode_prefill"),
    }
    for record in log.of_kind("mismatch"):
        assert record["verdict"] == "at floor" and record["attribution"] is None
    assert not log.of_kind("alarm")
    assert all(record["tokens"] for record in log.of_kind("worst"))


def test_the_canary_moves_together_once_the_adapter_trains(calibrated):
    canaries = [record["canary"] for record in read_run_log(calibrated).of_kind("mismatch")]
    assert [canary["verdict"] for canary in canaries] == [
        *("nothing moved", "moved together", "moved together"),
    ]
    # one process: the same forward on both sides, to the last bit
    assert all(canary["difference"] == 0 for canary in canaries)


def test_trackers_get_the_headline(calibrated):
    log = read_run_log(calibrated)
    for train, step in zip(log.of_kind("train"), log.of_kind("mismatch"), strict=True):
        assert train["mismatch/k3"] == pytest.approx(step["k3"], rel=1e-4)
        assert train["mismatch/alarms"] == 0 and "mismatch/ewma" in train


def test_a_floor_that_fits_is_used_again(base_folder, prompts_file, tmp_path, calibrated):
    copied(calibrated, tmp_path)
    make_grpo(base_folder, prompts_file, tmp_path, monitor=MONITOR, max_steps=1).train()
    [floor] = read_run_log(tmp_path).of_kind("floor")
    assert floor["reused"] and floor["not_reused"] is None


def test_a_floor_of_other_numerics_is_measured_again(
    base_folder, prompts_file, tmp_path, calibrated
):
    copied(calibrated, tmp_path)
    rollout = RolloutArguments(activations="mxfp8")
    make_grpo(
        base_folder, prompts_file, tmp_path, monitor=MONITOR, rollout=rollout, max_steps=1
    ).train()
    log = read_run_log(tmp_path)
    [floor] = log.of_kind("floor")
    assert not floor["reused"] and "activations 'none'" in floor["not_reused"]
    # only the trainer is exact: the gap is that of the rounding
    assert floor["k3"]["value"] > 1e-7
    mxfp8, same = (floor["parts"][name]["value"] for name in ("mxfp8", "same_path"))
    assert mxfp8 > 1000 * same
    [record] = log.of_kind("mismatch")
    assert record["k3"] > 1e-7


@pytest.mark.slow
def test_mirrored_rounding_brings_the_floor_down(base_folder, prompts_file, tmp_path):
    rollout = RolloutArguments(activations="mxfp8", train_activations="mxfp8")
    make_grpo(
        base_folder, prompts_file, tmp_path, monitor=MONITOR, rollout=rollout, max_steps=2
    ).train()
    log = read_run_log(tmp_path)
    [floor] = log.of_kind("floor")
    print(f"mirrored {floor['k3']}")
    assert floor["parts"]["mxfp8"] is None
    for record in log.of_kind("mismatch"):
        assert record["verdict"] == "at floor"


def test_a_damaged_floor_is_named(base_folder, prompts_file, tmp_path):
    (tmp_path / "floor.json").write_text("{")
    trainer = make_grpo(base_folder, prompts_file, tmp_path, monitor=MONITOR)
    with pytest.raises(K3TuneError, match="cannot read the floor"):
        trainer.train()


class Swallowed(Wrapped):
    """Says that a version is live and keeps the factors of the one before."""

    version = 0

    def load_adapter(self, version, source):
        self.version = version

    def generate(self, prompts, sampling, seeds):
        rollouts = super().generate(prompts, sampling, seeds)
        for rollout in rollouts:
            object.__setattr__(rollout, "adapter_version", self.version)
        return rollouts

    def health(self):
        health = super().health()
        object.__setattr__(health, "adapter_version", self.version)
        return health


def test_a_push_that_only_seems_to_arrive_is_found_by_the_canary(
    base_folder, prompts_file, tmp_path
):
    model = adapted(base_folder)
    engine = Swallowed(build_engine(RolloutArguments(), model, tmp_path))
    trainer = make_grpo(
        base_folder,
        prompts_file,
        tmp_path,
        model=model,
        engine=engine,
        monitor=STOP,
        max_steps=5,
        save_strategy="no",
    )
    with pytest.raises(TrainingError, match="stopped by an alarm, with a checkpoint"):
        trainer.train()
    log = read_run_log(tmp_path)
    alarms = log.of_kind("alarm")
    assert alarms[0]["step"] == 2 and (tmp_path / "checkpoint-2").is_dir()
    assert {alarm["cause"] for alarm in alarms} <= {"stale adapter", "adapter not applied"}
    assert "canary" in {alarm["alarm"] for alarm in alarms}
    assert log.of_kind("mismatch")[-1]["canary"]["verdict"] == "engine did not move"
    assert log.of_kind("end")[0]["reason"] == "alarm"


def test_without_floor_and_canary_the_numbers_are_still_there(base_folder, prompts_file, tmp_path):
    make_grpo(base_folder, prompts_file, tmp_path, max_steps=1).train()
    log = read_run_log(tmp_path)
    [record] = log.of_kind("mismatch")
    assert record["verdict"] == "not calibrated" and record["canary"] is None
    assert record["num_tokens"] > 0 and not log.of_kind("floor")
    assert not (tmp_path / "canary.json").exists()


def test_the_key_reads_from_the_file_as_it_was_written(calibrated):
    stored = json.loads((calibrated / "floor.json").read_text())["key"]
    assert stored["sampling"]["stop_token_ids"] and stored["engine"]["engine"] == "local"
    assert MappingProxyType(stored)["trainer"]["activations"] == "none"
