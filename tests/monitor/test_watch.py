"""The monitor over a run: verdicts, alarms and records, on samples drawn from known noise."""

import json
import re

import numpy as np
import pytest

from k3tune.monitor import Floor, FloorMonitor, record
from k3tune.monitor.canary import Canary
from k3tune.monitor.samples import make_samples
from k3tune.run_log import RunLogWriter, read_run_log

PROMPTS, EACH, LENGTH = 8, 4, 24


def draw(rng, *, prompts=PROMPTS, size=0.01, version=0, sampled=None, slope=0.0, offset=0.0):
    """One step. The mismatch of an unlikely token is larger, and some prompts have more of it."""
    count = prompts * EACH
    entropy = rng.exponential(0.3, size=(count, LENGTH))
    rollout = -rng.exponential(entropy + 0.01)
    spread = size * np.sqrt(-rollout) * np.exp(0.4 * rng.normal(size=(prompts, 1)).repeat(EACH, 0))
    train = rollout + spread * rng.standard_t(5, size=rollout.shape) + slope * (rollout + entropy)
    return make_samples(
        train + np.where(entropy > 0.1, offset, 0.0),
        rollout,
        np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(count, 1)),
        np.arange(count) // EACH,
        np.full(count, version if sampled is None else sampled),
        token_ids=rng.integers(0, 300, size=rollout.shape),
        entropy=entropy,
    )


@pytest.fixture(scope="module")
def floor():
    return Floor.calibrate(draw(np.random.default_rng(100), prompts=16), key={})


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_two_hundred_clean_steps_are_at_the_floor(floor, rng):
    monitor = FloorMonitor(floor)
    for step in range(200):
        report = monitor.step(draw(rng, version=step), adapter_version=step)
        assert report.mismatch["verdict"] == "at floor", (step, report.alarms)
        assert not report.alarms
    print(report.mismatch["cusum"], report.mismatch["ewma"])


def test_a_policy_that_grows_surer_does_not_leave_the_floor(floor, rng):
    monitor = FloorMonitor(floor)
    for step in range(50):
        samples = draw(rng)
        # only tokens it was sure of are left
        samples.mask[:] &= samples.rollout > -0.5
        assert monitor.step(samples, adapter_version=step).mismatch["verdict"] == "at floor"


def test_a_large_excess_is_above_the_floor_at_once(floor, rng):
    report = FloorMonitor(floor).step(draw(rng, size=0.05), adapter_version=0)
    values = report.mismatch
    assert values["verdict"] == "above floor"
    assert values["excess"] == pytest.approx(values["k3"] - floor.k3.value, rel=1e-3)
    assert values["excess_ratio"] == pytest.approx(25, rel=0.5)
    assert values["attribution"] == "unexplained" and values["attribution_text"]
    assert [alarm["alarm"] for alarm in report.alarms] == ["kl"]


def test_a_small_lasting_excess_is_a_drift(floor, rng):
    monitor, verdicts = FloorMonitor(floor), []
    for _ in range(12):
        report = monitor.step(draw(rng, size=0.02), adapter_version=0)
        verdicts.append(report.mismatch["verdict"])
    assert verdicts[0] == "at floor" and verdicts[-1] == "drifting"


def test_an_alarm_is_raised_once_and_again_after_it_went_away(floor, rng):
    monitor, kinds = FloorMonitor(floor), []
    for size in (0.05, 0.05, 0.05, *[0.01] * 30, 0.05):
        report = monitor.step(draw(rng, size=size), adapter_version=0)
        kinds.append([alarm["alarm"] for alarm in report.alarms])
    assert kinds[0] == ["kl"] and "kl" not in kinds[1] + kinds[2]
    assert kinds[-1] == ["kl"] and not any(kinds[4:-1])


@pytest.mark.parametrize(
    ("fault", "cause"), [({"slope": 0.1}, "temperature"), ({"offset": -0.03}, "top-p")]
)
def test_a_bias_is_named_inside_the_noise_of_a_floor(floor, rng, fault, cause):
    # far below what the size of r shows
    report = FloorMonitor(floor).step(draw(rng, **fault), adapter_version=0)
    assert report.mismatch["attribution"] == cause, report.mismatch["evidence"]
    assert cause in {alarm["alarm"] for alarm in report.alarms}


def test_without_a_floor_nothing_is_claimed(rng):
    report = FloorMonitor(None).step(draw(rng, size=0.3), adapter_version=0)
    values = report.mismatch
    assert values["verdict"] == "not calibrated" and not report.alarms
    assert values["excess"] is values["ewma"] is values["attribution"] is None
    assert values["k3"] > 0


def test_off_by_one_needs_no_floor(rng):
    samples = draw(rng)
    samples.rollout[:] = np.roll(samples.rollout, -1, axis=1)
    report = FloorMonitor(None).step(samples, adapter_version=0)
    assert report.mismatch["attribution"] == "off-by-one"
    assert [alarm["alarm"] for alarm in report.alarms] == ["off-by-one"]


def test_a_number_that_is_not_finite_is_an_alarm(floor, rng):
    samples = draw(rng)
    samples.train[3, 1] = np.nan
    report = FloorMonitor(floor).step(samples, adapter_version=0)
    assert report.mismatch["nan_count"] == 1 and report.mismatch["verdict"] == "at floor"
    [alarm] = report.alarms
    assert (alarm["alarm"], alarm["cause"], alarm["value"]) == ("not finite", "not finite", 1)


def test_stale_samples_are_counted_by_their_own_account(floor, rng):
    report = FloorMonitor(floor).step(draw(rng, size=0.1, sampled=3), adapter_version=5)
    assert (report.mismatch["version_lag"], report.mismatch["stale_samples"]) == (2, 32)
    assert report.mismatch["attribution"] == "stale adapter"


def test_a_failed_canary_is_an_alarm_at_the_floor(floor, rng):
    scores = [-0.5, -1.0, -0.2]
    monitor = FloorMonitor(floor, canary=Canary(scores, scores))
    moved = [-0.4, -1.1, -0.2]
    report = monitor.step(draw(rng), adapter_version=1, canary_scores=(scores, moved))
    assert report.mismatch["verdict"] == "at floor"
    assert report.mismatch["attribution"] == "stale adapter"
    [alarm] = report.alarms
    assert alarm["alarm"] == "canary" and "engine did not move" in alarm["text"]


def test_a_side_that_rounds_its_activations_is_told_by_the_measured_part(rng):
    part = draw(np.random.default_rng(1), prompts=16, size=0.05)
    clean = draw(np.random.default_rng(2), prompts=16, size=0.001)
    floor = Floor.calibrate(clean, key={}, parts={"mxfp8": part})
    report = FloorMonitor(floor).step(draw(rng, size=0.05), adapter_version=0)
    assert report.mismatch["attribution"] == "activation precision"
    report = FloorMonitor(floor).step(draw(rng, size=0.5), adapter_version=0)
    assert report.mismatch["attribution"] == "unexplained"


def test_a_small_part_that_is_missing_is_told_by_the_canary_alone(floor, rng):
    base, moves = np.full(32, -1.0), 0.01 * rng.normal(size=32)
    canary = Canary(base, base)
    engine = base + np.where(np.arange(32) == 5, 0.0, moves)
    report = FloorMonitor(floor, canary=canary).step(
        draw(rng, version=1), adapter_version=1, canary_scores=(engine, base + moves)
    )
    assert report.mismatch["verdict"] == "at floor"
    assert report.mismatch["attribution"] == "expert"
    assert "a part of the adapter differs" in report.alarms[0]["text"]


def test_a_rounded_adapter_is_told_by_a_canary_that_nearly_moves_together(rng):
    floor = Floor.calibrate(draw(np.random.default_rng(2), prompts=16, size=1e-6), key={})
    base, moves = np.full(32, -1.0), rng.normal(size=32)
    canary = Canary(base, base, adapter_rounded=True)
    engine = base + moves * (1 + 0.002 * rng.normal(size=32))
    report = FloorMonitor(floor, canary=canary).step(
        draw(rng, size=1e-3, version=1), adapter_version=1, canary_scores=(engine, base + moves)
    )
    assert report.mismatch["canary"]["verdict"] == "moved together"
    assert report.mismatch["attribution"] == "adapter rounding"


def test_an_empty_step_is_no_error(floor, rng):
    samples = draw(rng)
    samples.mask[:] = False
    report = FloorMonitor(floor).step(samples, adapter_version=0)
    assert report.mismatch["num_tokens"] == 0 and not report.worst and not report.alarms


def test_worst_tokens_have_their_text(floor, rng):
    samples = draw(rng)
    samples.mask[:, :3] = True
    samples.train[5, 2] = samples.rollout[5, 2] - 3
    monitor = FloorMonitor(floor, decode=lambda ids: " ".join(map(str, ids)))
    worst = monitor.step(samples, adapter_version=0).worst
    assert len(worst) == 8 and [abs(t["r"]) for t in worst] == sorted(
        (abs(t["r"]) for t in worst), reverse=True
    )
    first, ids = worst[0], samples.token_ids[5]
    assert (first["sample"], first["prompt"], first["position"]) == (5, 1, 2)
    assert (first["token_id"], first["text"]) == (ids[2], str(ids[2]))
    assert first["context"] == f"{ids[0]} {ids[1]}" and first["r"] == pytest.approx(-3)


def test_a_resumed_monitor_says_what_an_uninterrupted_one_does(floor):
    steps = [draw(np.random.default_rng(n), size=0.012, version=n) for n in range(12)]
    scores = [-0.5, -1.0, -0.2]

    def monitor():
        return FloorMonitor(floor, canary=Canary(scores, scores))

    def reports(watch, numbers):
        return [
            watch.step(steps[n], adapter_version=n, canary_scores=(scores, scores)).mismatch
            for n in numbers
        ]

    first, second = monitor(), monitor()
    whole = reports(monitor(), range(12))
    begun = reports(first, range(7))
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + reports(second, range(7, 12)) == whole


def test_the_records_are_the_documented_ones_and_small(floor, rng, tmp_path):
    scores = [-0.5, -1.0, -0.2]
    monitor = FloorMonitor(floor, canary=Canary(scores, scores), decode=str)
    report = monitor.step(draw(rng, size=0.05), adapter_version=1, canary_scores=(scores, scores))
    log = RunLogWriter(tmp_path / "run_log.jsonl")
    reused = floor.record(reused=False, not_reused=None, alarm_rate=monitor.alarm_rate)
    log.write("floor", 0, reused)
    log.write("mismatch", 1, report.mismatch)
    log.write("worst", 1, {"tokens": report.worst})
    for alarm in report.alarms:
        log.write("alarm", 1, alarm)
    log.close()
    sizes = [len(line) for line in (tmp_path / "run_log.jsonl").read_bytes().splitlines()]
    print(sizes)
    assert sizes[1] < 3072
    assert [r["kind"] for r in read_run_log(tmp_path).records] == [
        "floor",
        "mismatch",
        "worst",
        "alarm",
    ]
    for values in (reused, report.mismatch, report.worst[0], report.alarms[0]):
        undocumented = [name for name in values if not documented(name)]
        assert not undocumented
    assert report.mismatch["verdict"] in record.VERDICTS
    assert report.mismatch["attribution"] in record.CAUSES
    assert report.mismatch["canary"]["verdict"] in record.CANARY_VERDICTS
    assert {alarm["alarm"] for alarm in report.alarms} <= set(record.ALARMS)


def documented(name):
    """``name``, or the first of its group with its ending, as in ``is_sequence_mean``, ``_min``."""
    text = record.__doc__
    stem, _, ending = name.rpartition("_")
    grouped = f"``{stem}_mean``" in text and f"``_{ending}``" in text
    return bool(re.search(rf"``{name}``", text)) or grouped


def test_the_alarm_rate_is_that_of_its_tests(floor):
    # 7 sides of 5 charts, two CUSUMs each: under one in 10,000 steps
    assert FloorMonitor(floor).alarm_rate == pytest.approx(14 / 142_000)
