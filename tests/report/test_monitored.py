"""From the real monitor through the log to the report: what it found is what a reader is told."""

import sys
from pathlib import Path

import numpy as np
import pytest

from k3tune.monitor import Floor, FloorMonitor
from k3tune.monitor.canary import Canary
from k3tune.monitor.samples import make_samples
from k3tune.report.document import build_report
from k3tune.report.markdown import render_markdown
from k3tune.run_log import RunLogWriter

SAMPLES, TOKENS, EACH = 32, 40, 4
NOISE = 1e-3


def samples(seed, version, *, noise=NOISE, shift=0, behind=0, missing=0):
    """A step of tokens that two sides score alike but for noise, or for a fault."""
    rng = np.random.default_rng(seed)
    rollout = -(rng.exponential(0.7, (SAMPLES, TOKENS)) ** 1.5)
    train = rollout + rng.normal(0, noise, rollout.shape)
    rollout = np.roll(rollout, shift, axis=1)
    rollout[0, :missing] = np.nan
    return make_samples(
        train,
        rollout,
        np.ones_like(train),
        np.arange(SAMPLES) // EACH,
        [version - behind] * SAMPLES,
        token_ids=rng.integers(0, 800, train.shape),
    )


def logged_run(folder, faulty, **fault):
    """A log of clean steps, and of faulty ones from step ``faulty`` on."""
    floor = Floor.calibrate(samples(999, 0), key={})
    monitor = FloorMonitor(floor, decode=lambda ids: "|".join(map(str, ids)))
    log = RunLogWriter(folder / "run_log.jsonl")
    log.write("floor", 0, floor.record(reused=False, not_reused=None, alarm_rate=1e-4))
    for step in range(1, 25):
        step_samples = samples(step, step - 1, **(fault if step >= faulty else {}))
        report = monitor.step(step_samples, adapter_version=step - 1)
        log.write("mismatch", step, report.mismatch)
        log.write("worst", step, {"tokens": report.worst})
        for alarm in report.alarms:
            log.write("alarm", step, alarm)
    log.close()
    return folder


def test_a_clean_run_is_at_floor_and_every_plot_of_it_is_there(tmp_path):
    report = build_report([logged_run(tmp_path, 99)])
    [run] = report.facts["runs"]
    assert run["sentence"] == "At floor in every step so far."
    assert run["floor"]["low"] < run["k3"]["value"] < run["floor"]["high"]
    names = {plot.id for plot in report.plots}
    assert names >= {"kl", "abs_difference", "tests", "is_ratio", "ess", "masked", "version_lag"}
    assert names >= {"histogram", "by_probability", "by_position", "by_length", "scatter"}
    tokens = next(plot for plot in report.plots if plot.id == "scatter").matrix.values
    assert sum(value or 0 for row in tokens for value in row) == 24 * SAMPLES * TOKENS
    assert any("|" in token["context"] for token in run["worst_tokens"])


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"shift": 1}, "off-by-one"),
        ({"noise": 5 * NOISE, "behind": 1}, "stale adapter"),
        ({"noise": 5 * NOISE}, "unexplained"),
        ({"missing": 3}, "not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_told_with_its_step_and_cause(tmp_path, fault, cause):
    report = build_report([logged_run(tmp_path, 20, **fault)])
    [run] = report.facts["runs"]
    print(run["sentence"], run["explanation"])
    assert (run["attribution"], run["since"]) == (cause, 20)
    assert run["alarms"] == len(run["alarm_records"]) > 0
    assert {alarm["cause"] for alarm in run["alarm_records"]} == {cause}
    assert f"{cause}.**" in render_markdown(report).replace("\\", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("stale", "stale adapter"),
        ("scale", "adapter scale"),
        ("expert", "expert"),
        ("temperature", "temperature"),
        ("top-p", "top-p"),
        ("off-by-one", "off-by-one"),
        ("flips", "routing flips"),
    ],
)
def test_every_injected_fault_over_the_embedded_base_is_named(tmp_path, nano, fault, cause):
    lab, floor, canary_state, steps = nano
    monitor = FloorMonitor(floor, canary=Canary.restored(canary_state))
    log = RunLogWriter(tmp_path / "run_log.jsonl")
    log.write("floor", 0, floor.record(reused=False, not_reused=None, alarm_rate=1e-4))
    for version, name in ((1, None), (2, fault)):
        rollouts = steps[version]
        if name in ("stale", "scale", "expert", "temperature", "top-p"):
            rollouts = lab.sample(name, version, lab.prompts(6, seed=7), each=EACH, seed=3)
        found = monitor.step(
            lab.compare(name, rollouts, EACH, version),
            adapter_version=version,
            canary_scores=lab.canary_scores(name, version),
        )
        log.write("mismatch", version, found.mismatch)
        for alarm in found.alarms:
            log.write("alarm", version, alarm)
    log.close()
    [run] = build_report([tmp_path]).facts["runs"]
    print(run["sentence"], run["explanation"])
    assert run["verdict"] in ("above floor", "drifting")
    assert (run["attribution"], run["since"]) == (cause, 2)


@pytest.fixture(scope="module")
def nano():
    """k3-nano and an engine, its floor, its canary's state, and clean samples of two versions."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "monitor"))
    from nano_lab import NanoLab

    lab = NanoLab()
    prompts = lab.prompts(8, seed=1)
    calibration = lab.step(None, 0, prompts, each=EACH, seed=0)
    canary = lab.make_canary(calibration, prompts, EACH)
    steps = {
        version: lab.sample(None, version, lab.prompts(6, seed=7), each=EACH, seed=3)
        for version in (1, 2)
    }
    return lab, Floor.calibrate(calibration, key={}), canary.state(), steps
