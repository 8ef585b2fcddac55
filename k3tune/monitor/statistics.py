"""What the tests watch: few ratios of sums over a step's samples, each sensitive to other causes.

A chart's value at a step is one ratio of sums, so that what it does in a step of any size can be
drawn from the calibration's samples. Shape letters: ``S`` samples, ``T`` tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from k3tune.monitor.binned import probability_bin
from k3tune.monitor.estimators import k3_of
from k3tune.monitor.record import PROBABILITY_EDGES
from k3tune.monitor.routing import FAR_APART, shared_experts
from k3tune.monitor.samples import Floats, Samples


@dataclass(frozen=True)
class Chart:
    """One watched ratio.

    Attributes:
        name: of the columns of :class:`SampleSums`.
        logarithm: watch the ratio's logarithm (of a size), not the ratio (of a signed mean).
        smallest_std: of its value over clean steps, in its unit: a calibration of few samples, or
            one without any mismatch, does not make smaller moves matter.
    """

    name: str
    logarithm: bool
    smallest_std: float


CHARTS = (
    Chart("k3", True, 0.1),
    Chart("abs", True, 0.05),
    Chart("slope", False, 1e-4),
    Chart("bias", False, 1e-5),
    Chart("apart", False, 5e-4),
)
"""``k3`` and ``abs``: mean k3 and mean |r| over what the floor's tokens of the same rollout
probability have, so that a policy that grows surer does not look like a smaller floor. ``slope``:
of r on logp + entropy, which a temperature of one side makes its own logarithm. ``bias``: mean r,
which a renormalised top-p makes its mean log mass. ``apart``: share of tokens with most of their
experts apart: numerics swap one of two nearly equal experts, more or less often as the policy
moves, but never most of a token's."""
SIZE_CHARTS = ("k3", "abs")


@dataclass(frozen=True)
class Expected:
    """Mean k3 and |r| of the floor's tokens, by bin of rollout probability."""

    k3: Floats
    abs: Floats

    @classmethod
    def of(cls, samples: Samples) -> "Expected":
        """Measure them; a bin with few tokens leans on the mean of all."""
        good = samples.finite
        r_N = samples.log_ratio[good]
        bins, count = probability_bin(samples.rollout[good]), len(PROBABILITY_EDGES) - 1
        tokens = np.bincount(bins, minlength=count)

        def means(values: Floats) -> Floats:
            sums = np.bincount(bins, weights=values, minlength=count)
            return (sums + _PRIOR_TOKENS * values.mean()) / (tokens + _PRIOR_TOKENS)

        return cls(means(k3_of(r_N)), means(np.abs(r_N)))

    def to_json(self) -> dict[str, list[float]]:
        """As lists."""
        return {"k3": self.k3.tolist(), "abs": self.abs.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Expected":
        """What :meth:`to_json` wrote."""
        return cls(np.array(values["k3"]), np.array(values["abs"]))


# as many tokens of the overall mean are mixed into each bin
_PRIOR_TOKENS = 10.0
RESOLUTION = 3e-5
"""Nats that a log-probability computed in fp32 twice may differ by: smaller mismatches are equal.

Both sides of the size charts are lifted by it, or a floor of rounding errors (k3 7e-14 on k3-nano)
would call a rise to 1e-12 a fault."""


@dataclass(frozen=True)
class SampleSums:
    """Numerators and denominators of every chart, one row a sample.

    Attributes:
        prompts: ``[S]``, cluster of each sample.
        above, below: chart's name -> ``[S]``; a chart that the samples cannot feed is missing.
            ``routing``, share of (token, layer) routed apart, is no chart: floors record it.
    """

    prompts: np.ndarray
    above: Mapping[str, Floats]
    below: Mapping[str, Floats]

    @classmethod
    def of(cls, samples: Samples, expected: Expected) -> "SampleSums":
        """Sum each sample's counted tokens; samples without one are left out."""
        good = samples.finite
        rows = good.any(axis=1)
        r_ST, k3_ST = samples.log_ratio, k3_of(samples.log_ratio)
        bins_ST = probability_bin(np.where(good, samples.rollout, 0.0))
        pairs: dict[str, tuple[Floats, Floats]] = {
            "k3": (k3_ST + RESOLUTION**2 / 2, expected.k3[bins_ST] + RESOLUTION**2 / 2),
            "abs": (np.abs(r_ST) + RESOLUTION, expected.abs[bins_ST] + RESOLUTION),
            "bias": (r_ST, np.ones_like(r_ST)),
        }
        if samples.entropy is not None:
            surprise = np.where(good, samples.train + samples.entropy, 0.0)
            pairs["slope"] = (r_ST * surprise, surprise**2)
        if samples.train_experts is not None and samples.rollout_experts is not None:
            active, layers = samples.train_experts.shape[-1], samples.train_experts.shape[-2]
            shared = shared_experts(samples.train_experts, samples.rollout_experts)
            apart = (shared < active).sum(axis=-1).astype(np.float64)
            pairs["routing"] = (apart, np.full(apart.shape, float(layers)))
            far = shared.sum(axis=-1) < FAR_APART * layers * active
            pairs["apart"] = (far.astype(np.float64), np.ones_like(r_ST))
        above, below = (
            {
                name: np.where(good, pair[side], 0.0).sum(axis=1)[rows]
                for name, pair in pairs.items()
            }
            for side in (0, 1)
        )
        return cls(samples.prompts[rows], MappingProxyType(above), MappingProxyType(below))

    def to_json(self) -> dict[str, Any]:
        """As lists."""
        return {
            "prompts": self.prompts.tolist(),
            "above": {name: values.tolist() for name, values in self.above.items()},
            "below": {name: values.tolist() for name, values in self.below.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SampleSums":
        """What :meth:`to_json` wrote."""
        above, below = (
            MappingProxyType({name: np.array(column) for name, column in values[side].items()})
            for side in ("above", "below")
        )
        return cls(np.array(values["prompts"]), above, below)

    def value(self, chart: Chart, rows: Any = slice(None)) -> float | None:
        """A chart's value over some rows; None if the samples cannot feed it."""
        if chart.name not in self.above:
            return None
        above, below = self.above[chart.name][rows].sum(), self.below[chart.name][rows].sum()
        return float(ratio(chart, above, below))


def ratio(chart: Chart, above: Any, below: Any) -> Any:
    """A chart's value from its sums, of any shape."""
    share = above / np.maximum(below, _TINY)
    return np.log(np.maximum(share, _TINY)) if chart.logarithm else share


# two sides that agree to the last bit have a logarithm too
_TINY = 1e-12
