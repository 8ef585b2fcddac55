"""The sentence and the figures of the first screen, against the log."""

import math

import numpy as np
import pytest
from synthetic_logs import FAULTS, FLOOR_K3, Scenario, grpo_records, sft_records, write_run

from k3tune.monitor.record import CAUSES, VERDICTS
from k3tune.report.reading import read_run
from k3tune.report.verdict import headline, interval_of, judge


def judged(tmp_path, records):
    return judge(read_run(write_run(tmp_path, records)))


def values(records, kind, name):
    return [record[name] for record in records if record["kind"] == kind]


def test_a_clean_run_is_at_floor(tmp_path):
    verdict = judged(tmp_path, grpo_records(Scenario()))
    assert (verdict.verdict, verdict.since, verdict.attribution) == ("at floor", 1, None)
    assert verdict.sentence == "At floor in every step so far."


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_its_verdict_its_step_and_its_cause(tmp_path, fault):
    assert fault in CAUSES and FAULTS[fault][0] in VERDICTS
    verdict = judged(tmp_path, grpo_records(Scenario(fault=fault, fault_step=80)))
    word = FAULTS[fault][0]
    assert (verdict.verdict, verdict.since, verdict.attribution) == (word, 80, fault)
    assert verdict.sentence == f"{word.capitalize()} since step 80: {fault}."
    said = FAULTS[fault][1].format(old=118, new=119)
    assert verdict.explanation.endswith(f"{said[0].upper()}{said[1:]}.")


def test_the_cause_is_the_one_most_steps_name(tmp_path):
    records = grpo_records(Scenario(fault="top-p", fault_step=60))
    for record in records:
        if record["kind"] == "mismatch" and record["step"] in (60, 119, 120):
            record["attribution"] = "unexplained"
    assert judged(tmp_path, records).attribution == "top-p"


def with_verdicts(records, unsound):
    """Records whose mismatch verdicts are ``drifting`` at some steps and ``at floor`` elsewhere."""
    for record in records:
        if record["kind"] == "mismatch":
            bad = record["step"] in unsound
            record["verdict"] = "drifting" if bad else "at floor"
            record["attribution"] = "top-p" if bad else None
    return records


def test_a_run_that_came_back_to_its_floor_keeps_its_alarms_in_sight(tmp_path):
    records = grpo_records(Scenario(fault="top-p", fault_step=40))
    verdict = judged(tmp_path, with_verdicts(records, range(40, 61)))
    assert (verdict.verdict, verdict.since, verdict.attribution) == ("at floor", 61, None)
    assert "There were 3 alarms, the last at step 42" in verdict.explanation


def test_a_fault_that_shows_in_most_steps_is_not_overlooked_in_the_others(tmp_path):
    shown = [step for step in range(90, 120) if step % 3]
    verdict = judged(tmp_path, with_verdicts(grpo_records(Scenario()), shown))
    assert verdict.sentence == "Drifting since step 91: top-p."


def test_a_false_alarm_is_no_trouble(tmp_path):
    verdict = judged(tmp_path, with_verdicts(grpo_records(Scenario()), [60, 115]))
    assert (verdict.verdict, verdict.since) == ("at floor", 116)


def test_an_alarm_of_the_canary_is_said_even_where_the_kl_is_at_its_floor(tmp_path):
    records = grpo_records(Scenario())
    for record in records:
        if record["kind"] == "mismatch" and record["step"] >= 100:
            record["attribution"], record["attribution_text"] = "stale adapter", "nothing moved"
    verdict = judged(tmp_path, records)
    assert (verdict.verdict, verdict.attribution) == ("at floor", "stale adapter")
    assert verdict.sentence == "At floor, but with alarms since step 100: stale adapter."
    assert verdict.explanation.endswith("Nothing moved.")


def test_a_cause_found_without_a_floor_is_said(tmp_path):
    records = grpo_records(Scenario(steps=5, calibrated=False))
    records[-4] |= {"attribution": "off-by-one", "attribution_text": "shifted by one"}
    assert records[-4]["kind"] == "mismatch"
    verdict = judged(tmp_path, records)
    assert verdict.sentence == "Not calibrated: off-by-one."
    assert verdict.explanation.startswith("Shifted by one. The log has no floor")


@pytest.mark.parametrize(
    ("records", "word", "sentence"),
    [
        (grpo_records(Scenario(steps=5, calibrated=False)), "not calibrated", "Not calibrated."),
        (sft_records(steps=5), "no rollouts", "No rollouts in this run."),
        ([], "nothing logged", "Nothing is logged yet."),
    ],
    ids=["no floor", "sft", "empty"],
)
def test_runs_without_a_floor_say_why(tmp_path, records, word, sentence):
    verdict = judged(tmp_path, records)
    assert (verdict.verdict, verdict.sentence, verdict.since) == (word, sentence, None)


def test_the_figures_of_the_first_screen_are_those_of_the_log(tmp_path):
    records = grpo_records(Scenario(fault="stale adapter", fault_step=100))
    facts = headline(read_run(write_run(tmp_path, records)))
    k3 = values(records, "mismatch", "k3")[-50:]
    assert facts["k3"]["value"] == pytest.approx(np.mean(k3), rel=1e-5)
    assert facts["k3"]["steps"] == 50
    assert facts["k3"]["low"] < facts["k3"]["value"] < facts["k3"]["high"]
    assert facts["floor"] == {"value": FLOOR_K3, "low": 3.608e-7, "high": 4.592e-7}
    for name in ("reward", "loss"):
        logged = values(records, "train", name)
        assert facts[name]["then"] == pytest.approx(np.mean(logged[:12]), rel=1e-5)
        assert facts[name]["now"] == pytest.approx(np.mean(logged[-12:]), rel=1e-5)
        assert facts[name]["records"] == 12
    # the train record's version is the one after its step, the mismatch record's the one it judged
    assert (facts["adapter_version"], facts["steps"]) == (119, 120)
    tokens = sum(values(records, "mismatch", "num_tokens"))
    assert facts["masked_token_fraction"] == pytest.approx(21 * 2048 * 0.002 / tokens, rel=1e-5)
    assert facts["stale_samples"] == 21 * 16 and facts["alarms"] == 3
    assert facts["peak_memory_bytes"] == 912_000_000
    speed = values(records, "train", "tokens_per_s")[-50:]
    assert facts["tokens_per_s"] == pytest.approx(np.median(speed))


def test_the_interval_covers_the_mean_as_often_as_it_says(tmp_path):
    rng = np.random.default_rng(3)
    covered = 0
    for number in range(200):
        draws = rng.lognormal(0, 0.5, 50)
        records = [
            {"schema": 1, "kind": "mismatch", "time": 1.0, "step": step, "k3": value}
            for step, value in enumerate(draws.tolist(), start=1)
        ]
        k3 = headline(read_run(write_run(tmp_path / str(number), records)))["k3"]
        covered += k3["low"] <= math.exp(0.125) <= k3["high"]
    # 95 % nominal; 50 skewed draws cost a little, and 200 repeats have a spread of 1.5 %
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("value", [None, 3.0, {}, {"value": 1, "low": None, "high": 2}, []])
def test_what_is_no_interval_is_none(value):
    assert interval_of(value) is None
