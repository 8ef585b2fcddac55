"""A step's tokens in few numbers: what plots are drawn from.

Bins and names are those of :mod:`k3tune.monitor.record`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tune.monitor.estimators import k3_of, sample_means
from k3tune.monitor.record import PROBABILITY_EDGES, R_EDGES, SURPRISE_EDGES
from k3tune.monitor.samples import Floats, Ints, Samples

DIGITS = 4
"""Significant digits of a binned mean: plots need no more, and a log has many."""


def binned(samples: Samples) -> dict[str, Any]:
    """``histogram``, ``scatter``, ``by_probability``, ``by_position`` and ``by_length``."""
    good = samples.finite
    r_N = samples.log_ratio[good]
    train_N, rollout_N = samples.train[good], samples.rollout[good]
    position_N = np.broadcast_to(np.arange(good.shape[1]), good.shape)[good]
    length_S = samples.mask.sum(axis=1)[good.any(axis=1)]
    k3_S = sample_means(k3_of(samples.log_ratio), good)
    return {
        "histogram": np.bincount(np.digitize(r_N, R_EDGES), minlength=len(R_EDGES) + 1).tolist(),
        "scatter": _scatter(train_N, rollout_N),
        "by_probability": by_probability(r_N, rollout_N),
        "by_position": _buckets(position_N + 1, k3_of(r_N), "tokens"),
        "by_length": _buckets(length_S, k3_S, "samples"),
    }


def probability_bin(rollout_N: Floats) -> Ints:
    """The bin of :data:`~k3tune.monitor.record.PROBABILITY_EDGES` each token falls in."""
    inner = PROBABILITY_EDGES[1:-1]
    return np.digitize(np.exp(np.minimum(rollout_N, 0.0)), inner)


def by_probability(r_N: Floats, rollout_N: Floats) -> dict[str, list[Any]]:
    """Tokens, mean |r| and mean k3 by the probability the engine gave the token."""
    bins, count = probability_bin(rollout_N), len(PROBABILITY_EDGES) - 1
    return {
        "tokens": np.bincount(bins, minlength=count).tolist(),
        "abs_mean": _means(bins, np.abs(r_N), count),
        "k3": _means(bins, k3_of(r_N), count),
    }


def rounded(value: float) -> float:
    """To :data:`DIGITS` significant digits."""
    return float(f"{value:.{DIGITS - 1}e}")


def _scatter(train_N: Floats, rollout_N: Floats) -> list[list[int]]:
    side = len(SURPRISE_EDGES)
    # a log-probability above 0 by rounding belongs to the first bin
    i, j = (np.maximum(np.digitize(-x, SURPRISE_EDGES) - 1, 0) for x in (train_N, rollout_N))
    counts = np.bincount(i * side + j, minlength=side * side)
    return [[int(n // side), int(n % side), int(counts[n])] for n in counts.nonzero()[0]]


def _buckets(size_N: NDArray[Any], values_N: Floats, counted: str) -> dict[str, list[Any]]:
    """Counts and means by floor(log2(size)), up to the last bucket that is not empty."""
    bins = np.frexp(size_N.astype(np.float64))[1] - 1
    count = int(bins.max()) + 1 if bins.size else 0
    return {
        counted: np.bincount(bins, minlength=count).tolist(),
        "k3": _means(bins, values_N, count),
    }


def _means(bins: NDArray[Any], values: Floats, count: int) -> list[float | None]:
    tokens = np.bincount(bins, minlength=count)
    sums = np.bincount(bins, weights=values, minlength=count)
    return [rounded(s / n) if n else None for s, n in zip(sums, tokens, strict=True)]
