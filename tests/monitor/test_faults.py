"""Faults put between engine and trainer over k3-nano: each must be found at once and named.

Both sides compute in fp32, so the floor is what rounding leaves; scripts/power_table.py measures
what is found over the floors of BF16 and MXFP8.
"""

import pytest

from k3tune.monitor import Floor, FloorMonitor
from k3tune.monitor.canary import Canary
from nano_lab import NanoLab

EACH = 4
# the first version is clean, so that a canary has a version before
VERSION = 2
# the others change what is made of the same tokens
SAMPLED_OTHERWISE = ("stale", "scale", "expert", "temperature", "top-p")


@pytest.fixture(scope="module")
def lab():
    return NanoLab()


@pytest.fixture(scope="module")
def calibration(lab):
    """The floor and a canary's state, on samples of the base."""
    prompts = lab.prompts(6, seed=1)
    samples = lab.step(None, 0, prompts, each=EACH, seed=0)
    canary = lab.make_canary(samples, prompts, EACH)
    canary.check(1, *lab.canary_scores(None, 1))
    return Floor.calibrate(samples, key={}), canary.state()


@pytest.fixture(scope="module")
def judge(lab, calibration):
    """The report of a first faulty step, made once a fault."""
    floor, state = calibration
    prompts = lab.prompts(6, seed=7)
    sampled = {}
    reports = {}

    def report(fault):
        if fault not in reports:
            sampling = fault if fault in SAMPLED_OTHERWISE else None
            if sampling not in sampled:
                sampled[sampling] = lab.sample(sampling, VERSION, prompts, each=EACH, seed=3)
            samples = lab.compare(fault, sampled[sampling], EACH, VERSION)
            monitor = FloorMonitor(floor, canary=Canary.restored(state))
            scores = lab.canary_scores(fault, VERSION)
            reports[fault] = monitor.step(samples, adapter_version=VERSION, canary_scores=scores)
        return reports[fault]

    return report


def test_the_same_path_is_equal_to_the_rounding_of_fp32(calibration):
    floor, _ = calibration
    print(floor.k3)
    assert floor.k3.high <= 1e-6


def test_a_clean_step_is_at_the_floor(judge):
    report = judge(None)
    assert report.mismatch["verdict"] == "at floor" and not report.alarms
    assert report.mismatch["canary"]["verdict"] == "moved together"
    assert report.mismatch["canary"]["difference"] == 0
    assert report.mismatch["attribution"] is None


@pytest.mark.parametrize(
    ("fault", "cause", "alarm"),
    [
        ("stale", "stale adapter", "canary"),
        ("scale", "adapter scale", "canary"),
        ("expert", "expert", "canary"),
        ("temperature", "temperature", "temperature"),
        ("trainer temperature", "temperature", "temperature"),
        ("top-p", "top-p", "top-p"),
        ("off-by-one", "off-by-one", "off-by-one"),
        ("flips", "routing flips", "routing"),
    ],
)
def test_a_fault_is_found_in_its_first_step_and_named(judge, fault, cause, alarm):
    report = judge(fault)
    values = report.mismatch
    print(fault, values["k3"], values["attribution_text"])
    assert values["verdict"] == "above floor"
    assert values["attribution"] == cause
    assert {"kl", alarm} <= {entry["alarm"] for entry in report.alarms}
    assert {entry["cause"] for entry in report.alarms} == {cause}


def test_the_evidence_says_how_much(judge):
    hotter = judge("trainer temperature").mismatch
    # r is (1 / 1.1 - 1) times logp + entropy
    assert hotter["evidence"]["slope"] == pytest.approx(-1 / 11, abs=0.015)
    assert hotter["evidence"]["share"] > 0.9
    flips = judge("flips").mismatch
    assert flips["router_mismatch_tokens"] == pytest.approx(0.01, abs=0.01)
