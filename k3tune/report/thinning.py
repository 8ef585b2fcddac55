"""Long curves as short ones that hide no spike: mean, least and largest of every stretch."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tune.report.table import Numbers

MAX_POINTS = 300
"""A curve on a page has no more pixels to show them."""


class Curve(NamedTuple):
    """Points of a curve; up to :data:`MAX_POINTS` values stand as they are.

    Attributes:
        steps: step of the last value of each stretch.
        mean, low, high: of the stretch.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def thin(steps: NDArray[np.int64], values: Numbers, max_points: int = MAX_POINTS) -> Curve:
    """Cut a curve into at most ``max_points`` stretches of equally many values; NaN is left out."""
    there = ~np.isnan(values)
    steps, values = steps[there], values[there]
    if len(values) == 0:
        return Curve([], [], [], [])
    count = min(len(values), max_points)
    edges = np.linspace(0, len(values), count + 1).astype(np.int64)
    starts, sizes = edges[:-1], np.diff(edges)
    mean = np.add.reduceat(values, starts) / sizes
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Curve(steps[edges[1:] - 1].tolist(), *(_short(part) for part in (mean, low, high)))


def _short(values: Numbers) -> list[float]:
    return [short(value) for value in values.tolist()]


def short(value: float) -> float:
    """Six significant digits, so that a page carries no noise."""
    return float(f"{value:.6g}")
