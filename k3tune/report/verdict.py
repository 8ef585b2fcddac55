"""The sentence a report opens with, and the figures beside it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tune.report.number_text import figure
from k3tune.report.reading import WINDOW, Run
from k3tune.report.table import Columns, Numbers
from k3tune.report.thinning import short

_RESAMPLES = 1000
_AT_FLOOR, _NOT_FINITE = "at floor", "not finite"
# Sound records after which trouble is over, and the share of unsound ones that makes trouble.
_GAP, _SHARE = 10, 0.5


@dataclass(frozen=True)
class Verdict:
    """How the run's KL stands to its floor.

    Attributes:
        verdict: one of the monitor's, or ``no rollouts``, or ``nothing logged``.
        sentence: the same for people, with what is known of the cause.
        since: first step of the stretch this verdict has held for; None where it has no meaning.
        attribution: the monitor's word for the cause; None at the floor.
        explanation: what the verdict means or, off the floor, what the monitor says about it.
    """

    verdict: str
    sentence: str
    explanation: str = ""
    since: int | None = None
    attribution: str | None = None


def judge(run: Run) -> Verdict:
    """The verdict on a run, from its last records back."""
    if len(run.mismatch) == 0:
        if len(run.train) == 0:
            return Verdict("nothing logged", "Nothing is logged yet.")
        return Verdict(
            "no rollouts",
            "No rollouts in this run.",
            "It trains on given text, so there is no KL between trainer and engine.",
        )
    verdicts, causes = run.mismatch.texts["verdict"], _causes(run)
    if (verdicts[-1] or "not calibrated") == "not calibrated":
        return _not_calibrated(run)
    start = _trouble([v != _AT_FLOOR or bool(c) for v, c in zip(verdicts, causes, strict=True)])
    if start is None:
        return _at_floor(run)
    since = int(run.mismatch.steps[start])
    named = [cause for cause in causes[start:] if cause]
    attribution = Counter(named).most_common(1)[0][0] if named else None
    off = [verdict for verdict in verdicts[start:] if verdict != _AT_FLOOR]
    # the canary and the tests for single causes fire where the KL is still within its floor
    verdict = (off[-1] if off else None) or _AT_FLOOR
    opening = "At floor, but with alarms" if not off else f"{verdict[0].upper()}{verdict[1:]}"
    sentence = f"{opening} since step {since:,}" + (f": {attribution}." if attribution else ".")
    return Verdict(verdict, sentence, _explanation(run, start, attribution), since, attribution)


def _causes(run: Run) -> list[str | None]:
    """The monitor's attribution a record; tokens without a log-probability are one, too."""
    given = run.mismatch.texts["attribution"]
    missing = run.mismatch["nan_count"] > 0
    return [
        cause or (_NOT_FINITE if bad else None) for cause, bad in zip(given, missing, strict=True)
    ]


def _trouble(unsound: list[bool]) -> int | None:
    """Where the trouble begins that the last records are in; None if they are in none.

    A fault that is not much larger than the floor shows in many of its steps and not in all, and
    a clean run has a false alarm now and then.
    """
    places = [place for place, bad in enumerate(unsound) if bad]
    if not places or len(unsound) - places[-1] > _GAP:
        return None
    start = places[-1]
    count = 0
    for place in reversed(places):
        if start - place > _GAP:
            break
        start, count = place, count + 1
    lasting = unsound[-1] or count >= _SHARE * (len(unsound) - start)
    return start if lasting else None


def _at_floor(run: Run) -> Verdict:
    verdicts, steps = run.mismatch.texts["verdict"], run.mismatch.steps
    place = len(verdicts)
    while place and verdicts[place - 1] == _AT_FLOOR:
        place -= 1
    if place == 0:
        sentence, since = "At floor in every step so far.", int(steps[0])
    else:
        since = int(steps[min(place, len(steps) - 1)])
        sentence = f"At floor since step {since:,}."
    text = "Trainer and engine differ by no more than the floor that this run measured."
    if run.alarms:
        count = len(run.alarms)
        last = max(record["step"] for record in run.alarms)
        there, plural = ("There were", "s") if count > 1 else ("There was", "")
        text += f" {there} {count} alarm{plural}, the last at step {last:,}."
    return Verdict(_AT_FLOOR, sentence, text, since)


def _not_calibrated(run: Run) -> Verdict:
    text = "The log has no floor, so the KL below stands without a measure of what is usual."
    cause = _causes(run)[-1]
    if cause is None:
        return Verdict("not calibrated", "Not calibrated.", text)
    said = _said(run, cause)
    return Verdict("not calibrated", f"Not calibrated: {cause}.", f"{said} {text}", None, cause)


def _explanation(run: Run, start: int, attribution: str | None) -> str:
    ratio = _median(run.mismatch["excess_ratio"][start:])
    times = (
        "" if ratio is None else f"The KL is {figure(short(ratio))} times what the floor predicts."
    )
    return f"{times} {_said(run, attribution)}".strip()


def _said(run: Run, attribution: str | None) -> str:
    """The monitor's last sentence about a cause."""
    if attribution == _NOT_FINITE:
        count = int(np.nansum(run.mismatch["nan_count"]))
        return f"{figure(count)} tokens have no finite log-probability: the KL leaves them out."
    texts = run.mismatch.texts
    both = zip(texts["attribution"], texts["attribution_text"], strict=True)
    found = [text for cause, text in both if text and cause == attribution]
    return f"{found[-1][0].upper()}{found[-1][1:].removesuffix('.')}." if found else ""


def headline(run: Run) -> dict[str, Any]:
    """The figures of the first screen, JSON values; null where the log has none.

    ``k3`` is the mean over the last records with a 95 % bootstrap interval over steps, ``floor``
    what the run measured before training.
    """
    mismatch, train = run.mismatch, run.train
    floor = run.floor or {}
    versions = [part.last("adapter_version") for part in (mismatch, train)]
    masked = mismatch["masked_fraction"]
    tokens = mismatch["num_tokens"]
    known = ~np.isnan(masked) & ~np.isnan(tokens)
    share = None
    if known.any() and tokens[known].sum() > 0:
        share = short(float((masked[known] * tokens[known]).sum() / tokens[known].sum()))
    return {
        "steps": _last_step(run),
        "k3": _now_with_interval(mismatch, "k3"),
        "floor": interval_of(floor.get("k3")),
        "floor_reused": floor.get("reused") if isinstance(floor.get("reused"), bool) else None,
        "reward": _then_and_now(train, "reward"),
        "loss": _then_and_now(train, "loss"),
        "adapter_version": next((int(v) for v in versions if v is not None), None),
        "masked_token_fraction": share,
        "masked_tokens": round(float((masked[known] * tokens[known]).sum())) if share else 0,
        "stale_samples": int(np.nansum(mismatch["stale_samples"])),
        "not_finite_tokens": int(np.nansum(mismatch["nan_count"])),
        "alarms": len(run.alarms),
        "peak_memory_bytes": train.last("peak_memory_bytes"),
        "tokens_per_s": _median(train["tokens_per_s"][-WINDOW:]),
    }


def interval_of(value: Any) -> dict[str, float] | None:
    """``value``, ``low``, ``high`` of the monitor's interval if it is one."""
    if not isinstance(value, Mapping):
        return None
    numbers = [value.get(name) for name in ("value", "low", "high")]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    return {
        name: short(number)
        for name, number in zip(("value", "low", "high"), numbers, strict=True)
        if number is not None
    }


def _last_step(run: Run) -> int:
    return max((int(part.steps[-1]) for part in (run.train, run.mismatch) if len(part)), default=0)


def _now_with_interval(columns: Columns, name: str) -> dict[str, float | int] | None:
    values = _numbers(columns[name][-WINDOW:])
    if len(values) == 0:
        return None
    draws = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    mean = short(float(values.mean()))
    return {"value": mean, "low": short(low), "high": short(high), "steps": len(values)}


def _then_and_now(columns: Columns, name: str) -> dict[str, float | int] | None:
    """Means over the first and the last tenth of the records, at most 20 of them."""
    values = _numbers(columns[name])
    if len(values) == 0:
        return None
    count = max(1, min(20, len(values) // 10))
    then, now = values[:count].mean(), values[-count:].mean()
    return {"then": short(float(then)), "now": short(float(now)), "records": count}


def _numbers(values: Numbers) -> Numbers:
    return values[~np.isnan(values)]


def _median(values: Numbers) -> float | None:
    values = _numbers(values)
    return float(np.median(values)) if len(values) else None
