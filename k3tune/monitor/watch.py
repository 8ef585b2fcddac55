"""The monitor of a run: one step's samples in, what the log says about them out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tune.monitor.attribution import Attribution, Excess, attribute, off_by_one
from k3tune.monitor.binned import binned, rounded
from k3tune.monitor.canary import Canary, CanaryCheck
from k3tune.monitor.estimators import mismatch
from k3tune.monitor.floor import Floor, Reference
from k3tune.monitor.routing import router_mismatch
from k3tune.monitor.samples import Samples
from k3tune.monitor.sequential import (
    CUSUM_LIMIT,
    CUSUMS,
    EWMA_LIMIT,
    STEP_LIMIT,
    STEPS_BETWEEN_ALARMS,
    SequentialTest,
    standardised,
)
from k3tune.monitor.statistics import CHARTS, SIZE_CHARTS, Chart, SampleSums
from k3tune.monitor.worst import Decode, worst_tokens

_TWO_SIDED = ("slope", "bias")
_ALARM_OF_CAUSE = {
    "temperature": "temperature",
    "top-p": "top-p",
    "off-by-one": "off-by-one",
    "routing flips": "routing",
}


@dataclass(frozen=True)
class StepReport:
    """What the log gets of one step.

    Attributes:
        mismatch: the record ``mismatch``.
        worst: the ``tokens`` of the record ``worst``; empty without a counted token.
        alarms: one record ``alarm`` each, for tests that fired at this step and not at the last.
    """

    mismatch: dict[str, Any]
    worst: list[dict[str, Any]]
    alarms: list[dict[str, Any]]


class FloorMonitor:
    """Holds every step's mismatch against a floor.

    Args:
        floor: None: every step is ``not calibrated``.
        canary: the pinned trajectory's, or None.
        decode: ids -> text, for the worst tokens.
    """

    def __init__(
        self, floor: Floor | None, *, canary: Canary | None = None, decode: Decode | None = None
    ) -> None:
        self.floor = floor
        self.canary = canary
        self._decode = decode
        self._tests = {
            chart.name: SequentialTest(two_sided=chart.name in _TWO_SIDED) for chart in CHARTS
        }
        self._firing: set[str] = set()
        self._references: dict[tuple[str, int, int], Reference | None] = {}

    @property
    def alarm_rate(self) -> float:
        """Chance of a false alarm in one clean step, as designed: all CUSUMs of all charts."""
        sides = sum(2 if chart.name in _TWO_SIDED else 1 for chart in CHARTS)
        return len(CUSUMS) * sides / STEPS_BETWEEN_ALARMS

    def step(
        self,
        samples: Samples,
        *,
        adapter_version: int,
        canary_scores: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> StepReport:
        """Take in one optimizer step.

        Args:
            samples: everything it trained on, of all processes.
            adapter_version: the trainer's version when it scored them.
            canary_scores: the engine's and the trainer's, of the version last pushed.
        """
        versions = samples.adapter_versions
        lag = adapter_version - int(versions.min()) if versions.size else 0
        check = self._check(adapter_version, canary_scores)
        values: dict[str, Any] = {
            "adapter_version": adapter_version,
            "version_lag": lag,
            "stale_samples": int((versions < adapter_version).sum()),
            **mismatch(samples),
            **router_mismatch(samples),
        }
        fired, judged = self._judge(samples, values["k3"])
        named = self._named(samples, fired, check, lag)
        values |= judged
        values |= {
            "verdict": self._verdict(fired),
            "attribution": named.cause if named else None,
            "attribution_text": named.text if named else None,
            "evidence": named.evidence if named else None,
            "canary": None if check is None else check.record,
        }
        alarms = self._alarms(values, fired, named, check)
        return StepReport(
            {name: _short(value) for name, value in {**values, **binned(samples)}.items()},
            worst_tokens(samples, self._decode),
            alarms,
        )

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint, so that a resumed run goes on with the same tests."""
        return {
            "tests": {name: test.state() for name, test in self._tests.items()},
            "firing": sorted(self._firing),
            "canary": None if self.canary is None else self.canary.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        for name, values in state["tests"].items():
            self._tests[name].restore(values)
        self._firing = set(state["firing"])
        if state["canary"] is not None:
            self.canary = Canary.restored(state["canary"])

    def _check(
        self, version: int, scores: tuple[Sequence[float], Sequence[float]] | None
    ) -> CanaryCheck | None:
        if self.canary is None or scores is None:
            return None
        return self.canary.check(version, *scores)

    def _judge(self, samples: Samples, k3: float | None) -> tuple[dict[str, float], dict[str, Any]]:
        """Tests that fire, with the value that made them, and the fields about the floor."""
        fields: dict[str, Any] = dict.fromkeys(
            ("excess", "excess_ratio", "ewma", "cusum", "ewma_limit", "cusum_limit")
        )
        if self.floor is None or k3 is None:
            return {}, fields
        sums = SampleSums.of(samples, self.floor.expected)
        fired: dict[str, float] = {}
        for chart in CHARTS:
            z = self._standardised(chart, sums)
            if z is None:
                continue
            test = self._tests[chart.name]
            test.update(z)
            two_sided = chart.name in _TWO_SIDED
            if (abs(z) if two_sided else z) > STEP_LIMIT:
                fired[f"{chart.name} step"] = z
            if test.fired:
                fired[f"{chart.name} sequence"] = test.cusum
        ratio = sums.value(CHARTS[0])
        headline = self._tests["k3"]
        fields |= {
            "excess": k3 - self.floor.k3.value,
            "excess_ratio": None if ratio is None else math.exp(ratio),
            "ewma": headline.ewma,
            "cusum": max(self._tests[name].cusum for name in SIZE_CHARTS),
            "ewma_limit": EWMA_LIMIT,
            "cusum_limit": CUSUM_LIMIT,
        }
        return fired, fields

    def _standardised(self, chart: Chart, sums: SampleSums) -> float | None:
        assert self.floor is not None
        value = sums.value(chart)
        if value is None:
            return None
        num_prompts = len(np.unique(sums.prompts))
        size = (chart.name, num_prompts, max(1, round(len(sums.prompts) / num_prompts)))
        if size not in self._references:
            self._references[size] = self.floor.reference(chart, *size[1:])
        reference = self._references[size]
        if reference is None:
            return None
        return standardised(
            value,
            reference.mean,
            max(reference.std, chart.smallest_std),
            reference.error,
            two_sided=chart.name in _TWO_SIDED,
        )

    def _verdict(self, fired: Mapping[str, float]) -> str:
        if self.floor is None:
            return "not calibrated"
        if any(f"{name} step" in fired for name in SIZE_CHARTS):
            return "above floor"
        return "drifting" if any(name.endswith("sequence") for name in fired) else "at floor"

    def _named(
        self,
        samples: Samples,
        fired: Mapping[str, float],
        check: CanaryCheck | None,
        lag: int,
    ) -> Attribution | None:
        failed = check is not None and check.failed
        if self.floor is None:
            return off_by_one(samples)
        if not fired and not failed:
            return None
        charts = frozenset(name.split()[0] for name in fired)
        return attribute(Excess.of(samples, self.floor, check, lag, charts))

    def _alarms(
        self,
        values: Mapping[str, Any],
        fired: Mapping[str, float],
        named: Attribution | None,
        check: CanaryCheck | None,
    ) -> list[dict[str, Any]]:
        """Records of what fires now and did not before."""
        cause = named.cause if named else "unexplained"
        text = named.text if named else ""
        found: dict[str, tuple[float | None, float]] = {}
        for name, value in fired.items():
            chart, kind = name.split()
            limit = STEP_LIMIT if kind == "step" else CUSUM_LIMIT
            if chart in SIZE_CHARTS:
                found.setdefault("kl" if kind == "step" else "drift", (value, limit))
            else:
                found.setdefault(_ALARM_OF_CAUSE.get(cause, "drift"), (value, limit))
        if cause == "off-by-one" and named is not None:
            found["off-by-one"] = (named.evidence["abs_mean_shifted"], named.evidence["abs_mean"])
        if check is not None and check.failed:
            found["canary"] = (check.record["difference"], check.record["floor"])
        if values["nan_count"]:
            found["not finite"] = (float(values["nan_count"]), 0.0)
        new = {name: found[name] for name in found if name not in self._firing}
        self._firing = set(found)
        return [
            {
                "alarm": name,
                "cause": "not finite" if name == "not finite" else cause,
                "text": _sentence(name, value, limit, text, values),
                "value": value,
                "limit": limit,
            }
            for name, (value, limit) in new.items()
        ]


def _sentence(
    alarm: str, value: float | None, limit: float, text: str, values: Mapping[str, Any]
) -> str:
    if alarm == "not finite":
        return (
            f"{values['nan_count']} tokens have a log-probability that is not finite: they are "
            "left out of every mean"
        )
    if alarm == "canary":
        begin = f"the canary: {values['canary']['verdict']}"
    else:
        begin = (
            f"the mismatch left the floor ({alarm}: {value:.3g}, limit {limit:.3g}; k3 "
            f"{values['k3']:.2e})"
        )
    return f"{begin}; {text}" if text else begin


def _short(value: Any) -> Any:
    """Numbers with few digits, and none that JSON cannot hold, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _short(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(x) if isinstance(x, float) and math.isfinite(x) else x for x in value]
    return value
