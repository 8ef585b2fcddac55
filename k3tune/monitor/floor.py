"""The mismatch that is there before anything was trained: measured once, kept in the run's folder.

Tokens of a sample, and samples of a prompt, are not independent: every interval comes from drawing
whole prompts with replacement.

Shape letters: ``P`` prompts, ``S`` samples.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from k3tune.errors import ConfigError, K3TuneError
from k3tune.files import replace_file
from k3tune.monitor.binned import by_probability
from k3tune.monitor.estimators import k3_of, sample_means
from k3tune.monitor.record import PARTS
from k3tune.monitor.samples import Floats, Ints, Samples
from k3tune.monitor.statistics import Chart, Expected, SampleSums, ratio

FILE_NAME = "floor.json"
SCHEMA = 1

_DRAWS = 2000
_COVERED = 0.95
# a bootstrap over fewer clusters says nothing about their spread
_FEWEST_PROMPTS = 4


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """What a chart does in clean steps.

    Attributes:
        mean, std: of its value over steps.
        error: standard error of ``mean``, which was measured on few prompts.
    """

    mean: float
    std: float
    error: float


@dataclass(frozen=True)
class Floor:
    """A measured floor.

    Attributes:
        key: what it depends on: ``engine``, ``trainer``, ``base``, ``sampling`` (JSON values).
        k3, k3_token_mean, abs_mean, router_mismatch: as in the record ``floor``.
        parts: cause (:data:`~k3tune.monitor.record.PARTS`) -> interval of its k3.
        num_prompts, num_samples, num_tokens: what it was measured on.
        by_probability: for plots.
        expected: k3 and |r| by rollout probability.
        sums: what steps are drawn from.
    """

    key: Mapping[str, Any]
    k3: Interval
    k3_token_mean: Interval
    abs_mean: Interval
    router_mismatch: Interval | None
    parts: Mapping[str, Interval | None]
    num_prompts: int
    num_samples: int
    num_tokens: int
    by_probability: Mapping[str, Any]
    expected: Expected
    sums: SampleSums

    @classmethod
    def calibrate(
        cls,
        samples: Samples,
        *,
        key: Mapping[str, Any],
        parts: Mapping[str, Samples] | None = None,
    ) -> Self:
        """Measure the floor on samples of the base (the adapter at B = 0).

        Args:
            samples: sampled and scored as the run will.
            key: see the class.
            parts: cause -> the same completions with only that cause between the two sides.

        Raises:
            ConfigError: for fewer than 4 prompts, no counted token, a log-probability that is not
                finite, or an unknown part.
        """
        unknown = sorted(set(parts or {}) - set(PARTS))
        if unknown:
            raise ConfigError(f"floor parts {unknown} are unknown, expected some of {PARTS}")
        for name, part in {"floor": samples, **(parts or {})}.items():
            _check_usable(name, part)
        good, clusters = samples.finite, samples.prompts[samples.finite.any(axis=1)]
        r_N = samples.log_ratio[good]
        expected = Expected.of(samples)
        sums = SampleSums.of(samples, expected)
        return cls(
            key=MappingProxyType(dict(key)),
            k3=k3_interval(samples),
            k3_token_mean=_token_interval(k3_of(samples.log_ratio), samples, clusters),
            abs_mean=_token_interval(np.abs(samples.log_ratio), samples, clusters),
            router_mismatch=(
                cluster_interval(sums.above["routing"], sums.below["routing"], clusters)
                if "routing" in sums.above
                else None
            ),
            parts=MappingProxyType(
                {name: k3_interval(part) for name, part in (parts or {}).items()}
            ),
            num_prompts=len(np.unique(clusters)),
            num_samples=len(clusters),
            num_tokens=int(good.sum()),
            by_probability=by_probability(r_N, samples.rollout[good]),
            expected=expected,
            sums=sums,
        )

    def reference(
        self, chart: Chart, num_prompts: int, samples_per_prompt: int
    ) -> Reference | None:
        """What a chart does in clean steps of this size; None where it was not calibrated."""
        if chart.name not in self.sums.above:
            return None
        above, below = (self.sums.above[chart.name], self.sums.below[chart.name])
        rng = np.random.default_rng(0)
        all_prompts, per_prompt = self.num_prompts, self.num_samples // self.num_prompts
        clusters = _rows_by_cluster(self.sums.prompts)
        steps = _drawn(above, below, clusters, num_prompts, samples_per_prompt, rng)
        whole = _drawn(above, below, clusters, all_prompts, max(per_prompt, 1), rng)
        values, means = (ratio(chart, *drawn) for drawn in (steps, whole))
        return Reference(float(values.mean()), float(values.std()), float(means.std()))

    def differs_from(self, key: Mapping[str, Any]) -> str | None:
        """A sentence that says why this floor does not hold for another key; None if it does."""
        for name in sorted({*self.key, *key}):
            ours, theirs = self.key.get(name), key.get(name)
            if ours == theirs:
                continue
            if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                inner = next(k for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k))
                name, ours, theirs = f"{name} {inner}", ours.get(inner), theirs.get(inner)
            return (
                f"the stored floor was measured with {name} {ours!r} and the run has {theirs!r}: "
                "it is measured again"
            )
        return None

    def record(self, *, reused: bool, not_reused: str | None, alarm_rate: float) -> dict[str, Any]:
        """The values of the log's ``floor`` record.

        Args:
            reused: whether it was read from the run's folder.
            not_reused: what :meth:`differs_from` said of the one that was found there.
            alarm_rate: chance of a false alarm in one clean step.
        """
        shown = ("k3", "k3_token_mean", "abs_mean")
        counts = ("num_prompts", "num_samples", "num_tokens")
        return {
            **{name: asdict(getattr(self, name)) for name in shown},
            **{name: getattr(self, name) for name in counts},
            "key": dict(self.key),
            "parts": {name: _optional(self.parts.get(name)) for name in PARTS},
            "router_mismatch": _optional(self.router_mismatch),
            "by_probability": dict(self.by_probability),
            "reused": reused,
            "not_reused": not_reused,
            "alarm_rate": alarm_rate,
        }

    def save(self, folder: str | Path) -> None:
        """Write ``floor.json``, whole or not at all."""
        values = {
            "schema": SCHEMA,
            **self.record(reused=False, not_reused=None, alarm_rate=0.0),
            "expected": self.expected.to_json(),
            "sums": self.sums.to_json(),
        }
        with replace_file(Path(folder) / FILE_NAME) as file:
            json.dump(values, file)

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """Read a run's floor; None if it has none.

        Raises:
            K3TuneError: if the file cannot be read or was written by another version.
        """
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["schema"] != SCHEMA:
                raise K3TuneError(
                    f"{path} has schema {values['schema']!r}, expected {SCHEMA}: remove it, and "
                    "the floor is measured again"
                )
            intervals: dict[str, Any] = {
                name: Interval(**values[name]) for name in ("k3", "k3_token_mean", "abs_mean")
            }
            return cls(
                key=MappingProxyType(values["key"]),
                parts=MappingProxyType({n: _interval(v) for n, v in values["parts"].items() if v}),
                router_mismatch=_interval(values["router_mismatch"]),
                expected=Expected.from_json(values["expected"]),
                sums=SampleSums.from_json(values["sums"]),
                by_probability=values["by_probability"],
                **intervals,
                **{n: values[n] for n in ("num_prompts", "num_samples", "num_tokens")},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, K3TuneError):
                raise
            raise K3TuneError(
                f"cannot read the floor {path} ({error}): remove it, and it is measured again"
            ) from error


def k3_interval(samples: Samples) -> Interval:
    """k3 (mean a sample, then over samples), by drawing prompts."""
    good = samples.finite
    means = sample_means(k3_of(samples.log_ratio), good)
    return cluster_interval(means, np.ones_like(means), samples.prompts[good.any(axis=1)])


def cluster_interval(above_S: Floats, below_S: Floats, clusters_S: Ints) -> Interval:
    """A ratio of sums with 95 % bounds by a bootstrap over clusters.

    Args:
        above_S, below_S: numerator and denominator of each sample.
        clusters_S: the cluster of each sample; clusters are drawn whole.
    """
    _, index = np.unique(clusters_S, return_inverse=True)
    above, below = (np.bincount(index, weights=part) for part in (above_S, below_S))
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(above), size=(_DRAWS, len(above)))
    values = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
    low, high = np.quantile(values, [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    return Interval(float(above.sum() / below.sum()), float(low), float(high))


def _token_interval(values_ST: Floats, samples: Samples, clusters: Ints) -> Interval:
    good = samples.finite
    rows = good.any(axis=1)
    sums = np.where(good, values_ST, 0.0).sum(axis=1)[rows]
    return cluster_interval(sums, good.sum(axis=1)[rows].astype(np.float64), clusters)


def _rows_by_cluster(clusters_S: Ints) -> list[Ints]:
    return [np.flatnonzero(clusters_S == cluster) for cluster in np.unique(clusters_S)]


def _drawn(
    above_S: Floats,
    below_S: Floats,
    clusters: list[Ints],
    num_prompts: int,
    samples_per_prompt: int,
    rng: np.random.Generator,
) -> tuple[Floats, Floats]:
    """Sums of :data:`_DRAWS` steps: prompts with replacement, then samples of each."""
    chosen = rng.integers(len(clusters), size=(_DRAWS, num_prompts))
    sizes = np.array([len(rows) for rows in clusters])
    table = np.zeros((len(clusters), sizes.max()), dtype=np.int64)
    for number, rows in enumerate(clusters):
        table[number, : len(rows)] = rows
    places = rng.random((_DRAWS, num_prompts, samples_per_prompt)) * sizes[chosen][..., None]
    rows = table[chosen[..., None], places.astype(np.int64)].reshape(_DRAWS, -1)
    return above_S[rows].sum(axis=1), below_S[rows].sum(axis=1)


def _check_usable(name: str, samples: Samples) -> None:
    good = samples.finite
    if (samples.mask & ~good).any():
        raise ConfigError(
            f"{(samples.mask & ~good).sum()} log-probabilities of the {name} calibration are not "
            "finite, expected numbers: the base overflows in the chosen dtype, on one side"
        )
    prompts = len(np.unique(samples.prompts[good.any(axis=1)]))
    if prompts < _FEWEST_PROMPTS:
        raise ConfigError(
            f"the {name} calibration has {prompts} prompts with a counted token, expected at least "
            f"{_FEWEST_PROMPTS}: an interval comes from how prompts differ"
        )


def _interval(values: Mapping[str, float] | None) -> Interval | None:
    return None if values is None else Interval(**values)


def _optional(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)
