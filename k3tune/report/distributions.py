"""The plots that are not over steps: what the last records' tokens look like, and heat maps.

Counts are summed over the last records, means are weighted by the tokens they stand for.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tune.monitor.record import PARTS, PROBABILITY_EDGES, R_EDGES, SURPRISE_EDGES
from k3tune.report.number_text import figure
from k3tune.report.plot import SECTIONS, Kind, Line, Matrix, Plot
from k3tune.report.reading import Run
from k3tune.report.table import Numbers
from k3tune.report.thinning import short
from k3tune.report.verdict import interval_of

_MISMATCH, _, _MACHINE = SECTIONS
_MAX_COLUMNS = 60
# Bin n of the histogram ends at edge n, bin n of probabilities begins there.
_TICKS: dict[str, tuple[tuple[float, str], ...]] = {
    "histogram": (
        *((place + 0.5, f"{R_EDGES[place]:.0e}".replace("e-0", "e-")) for place in (8, 21)),
        *((place + 0.5, f"{R_EDGES[place]:g}") for place in (0, 4, 25, 29)),
        (len(R_EDGES) / 2, "0"),
    ),
    "by_probability": tuple(
        (place - 0.5, f"{PROBABILITY_EDGES[place]:g}") for place in (0, 2, 4, 6, 8, 10)
    ),
}
_PART_NAMES = {
    "same_path": "same path",
    "decode_prefill": "decode, prefill",
    "mxfp8": "MXFP8 activations",
    "routing": "routing flips",
    "adapter_rounding": "adapter rounding",
}


def distribution_plots(runs: Sequence[Run]) -> Iterator[Plot]:
    """Every plot of this kind that the logs have numbers for."""
    yield from _profiles(runs)
    for number, run in enumerate(runs):
        own = number if len(runs) > 1 else None
        yield from _scatter(run, own)
        yield from _router_heat(run, own)
        yield from _load_heat(run, own)


def _profiles(runs: Sequence[Run]) -> Iterator[Plot]:
    sources = (
        (_histogram, "histogram", "Histogram of r", "share of tokens", "r, nats",
         "Tokens by r, in half decades on both sides of 0: two even humps are usual. A tilt to one "
         "side is a wrong temperature, a hump further out a wrong token."),
        (_by_probability, "by_probability", "Difference by probability", "mean |r|, nats",
         "the engine's probability",
         "Unlikely tokens differ most, whatever the cause. Dashes are the floor: an excess at the "
         "left alone is rounding, one everywhere is another policy."),
        (_by_position, "by_position", "KL by position", "nats a token", "token of the completion",
         "Flat is usual. A rise along the text points at a state that drifts in decoding; a peak "
         "at the first token at a shift by one."),
        (_by_length, "by_length", "KL by length", "nats a token", "tokens in the completion",
         "Long samples that differ more than short ones lose their weight in sequence-level "
         "corrections first."),
        (_floor_parts, "floor_parts", "What the floor is made of", "nats a token", "k3",
         "Each cause alone, with its 95 % interval, measured before training. The largest is what "
         "to mirror in the trainer."),
    )  # fmt: skip
    for make, name, title, unit, x_axis, how in sources:
        lines = tuple(
            line for number, run in enumerate(runs) for line in make(number, run, len(runs) == 1)
        )
        if lines:
            kind: Kind = "intervals" if name == "floor_parts" else "profile"
            ticks = _TICKS.get(name) or tuple(_starts(lines))
            yield Plot(name, _MISMATCH, title, unit, how, kind, x_axis, True, lines, ticks=ticks)


def _starts(lines: Sequence[Line]) -> Iterator[tuple[float, str]]:
    """Every bucket by where it starts."""
    longest = max(lines, key=lambda line: len(line.x))
    for place, bucket in enumerate(longest.x):
        yield float(place), str(bucket).split(" to ")[0]


def _histogram(number: int, run: Run, alone: bool) -> Iterator[Line]:
    counts = _sum(record.get("histogram") for record in run.distributions)
    if counts is not None and len(counts) == len(R_EDGES) + 1 and counts.sum() > 0:
        labels = [f"{edge:.2g}".replace("e-0", "e-") for edge in R_EDGES]
        names = [
            f"< {labels[0]}",
            *(f"{a} to {b}" for a, b in pairwise(labels)),
        ]
        names.append(f"> {labels[-1]}")
        share = counts / counts.sum()
        yield Line(number, "histogram", "tokens", names, _values(share))


def _by_probability(number: int, run: Run, alone: bool) -> Iterator[Line]:
    names = [f"{a:g} to {b:g}" for a, b in pairwise(PROBABILITY_EDGES)]
    sources = [("now", [record.get("by_probability") for record in run.distributions])]
    if alone and run.floor:
        sources.append(("floor", [run.floor.get("by_probability")]))
    for label, buckets in sources:
        mean = _weighted(buckets, "tokens", "abs_mean", len(names))
        if mean is not None:
            name = "by_probability" if label == "now" else "floor by_probability"
            yield Line(number, name, label, names, _values(mean))


def _by_position(number: int, run: Run, alone: bool) -> Iterator[Line]:
    mean = _weighted([record.get("by_position") for record in run.distributions], "tokens", "k3")
    if mean is not None:
        names = [f"{2**n - 1} to {2 ** (n + 1) - 2}" if n else "0" for n in range(len(mean))]
        yield Line(number, "by_position", "k3", names, _values(mean))


def _by_length(number: int, run: Run, alone: bool) -> Iterator[Line]:
    mean = _weighted([record.get("by_length") for record in run.distributions], "samples", "k3")
    if mean is not None:
        names = [f"{2**n} to {2 ** (n + 1) - 1}" if n else "1" for n in range(len(mean))]
        yield Line(number, "by_length", "k3", names, _values(mean))


def _floor_parts(number: int, run: Run, alone: bool) -> Iterator[Line]:
    floor = run.floor or {}
    parts = floor.get("parts")
    parts = parts if isinstance(parts, Mapping) else {}
    intervals = {_PART_NAMES[part]: interval_of(parts.get(part)) for part in PARTS}
    intervals = {"floor, whole": interval_of(floor.get("k3")), **intervals}
    known = {name: interval for name, interval in intervals.items() if interval}
    if len(known) > 1:
        value, low, high = ([i[key] for i in known.values()] for key in ("value", "low", "high"))
        yield Line(number, "floor parts", "k3", list(known), list(value), low, high)


def _scatter(run: Run, own: int | None) -> Iterator[Plot]:
    size = len(SURPRISE_EDGES)
    counts = np.zeros((size, size))
    for record in run.distributions:
        for cell in _list(record.get("scatter")):
            match cell:
                case [int(i), int(j), int(tokens)] if 0 <= i < size and 0 <= j < size:
                    counts[i, j] += tokens
    if counts.sum() == 0:
        return
    names = [figure(edge) for edge in SURPRISE_EDGES]
    values = [[count or None for count in row] for row in counts.tolist()]
    yield Plot(
        _named("scatter", own),
        _MISMATCH,
        "Trainer against engine, token by token",
        "tokens by colour, the trainer's -log p upwards",
        "Tokens by -log p of both sides, surprising ones to the upper right. They belong on the "
        "diagonal; a tilt is a wrong temperature, a cloud beside it wrong tokens.",
        "cells",
        "-log p of the engine, nats",
        log=True,
        matrix=Matrix("-log p of the trainer, nats", "-log p of the engine, nats",
                      names, names, values, "tokens"),
        run=own,
    )  # fmt: skip


def _router_heat(run: Run, own: int | None) -> Iterator[Plot]:
    rows = [(step, [_float(v) for v in layers]) for step, layers in run.router_layers]
    if not rows:
        return
    width = max(len(layers) for _, layers in rows)
    values = np.array([[*layers, *[np.nan] * (width - len(layers))] for _, layers in rows])
    yield from _heat(
        _named("router_heat", own),
        _MISMATCH,
        "Router mismatch by layer",
        "share of tokens",
        "Share of tokens whose experts differ between trainer and engine, from the first MoE layer "
        "(bottom) to the last. Rounding grows with depth; a single bright layer is a fault.",
        np.array([step for step, _ in rows]),
        values,
        [f"MoE {place + 1}" for place in range(width)],
        own,
    )


def _load_heat(run: Run, own: int | None) -> Iterator[Plot]:
    names = [name for name in run.train.names("router_load/") if name.split("/")[1].isdigit()]
    names.sort(key=lambda name: int(name.split("/")[1]))
    if names:
        yield from _heat(
            _named("load_heat", own),
            _MACHINE,
            "Load of the busiest expert by layer",
            "tokens over the mean",
            "1 is an even load. A layer that grows bright sends ever more tokens to one expert, "
            "which one GPU then waits for.",
            run.train.steps,
            np.stack([run.train[name] for name in names], axis=1),
            [name.split("/")[1] for name in names],
            own,
        )


def _heat(
    name: str,
    section: str,
    title: str,
    unit: str,
    how: str,
    steps: NDArray[np.int64],
    values: Numbers,
    layers: list[str],
    own: int | None,
) -> Iterator[Plot]:
    """A heat map of layers over steps, the mean of every stretch of steps."""
    if np.isnan(values).all():
        return
    count = min(len(steps), _MAX_COLUMNS)
    edges = np.linspace(0, len(steps), count + 1).astype(np.int64)
    there = ~np.isnan(values)
    sums = np.add.reduceat(np.where(there, values, 0.0), edges[:-1], axis=0)
    counts = np.add.reduceat(there.astype(np.float64), edges[:-1], axis=0)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    matrix = Matrix(
        "layer",
        "optimizer step",
        layers,
        [str(step) for step in steps[edges[1:] - 1]],
        [_values(row) for row in means.T],
        unit,
    )
    yield Plot(name, section, title, unit, how, "heat", matrix=matrix, run=own)


def _named(name: str, own: int | None) -> str:
    return name if own is None else f"{name}_{own}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _values(values: Numbers) -> list[float | None]:
    return [None if value != value else short(value) for value in values.tolist()]


def _padded(rows: Sequence[list[Any]]) -> Numbers:
    width = max((len(row) for row in rows), default=0)
    return np.array([[*map(_float, row), *[np.nan] * (width - len(row))] for row in rows])


def _sum(rows: Any) -> Numbers | None:
    """Sum of the lists of one length, which is that of the last."""
    lists = [row for row in map(_list, rows) if row]
    lists = [row for row in lists if len(row) == len(lists[-1])]
    return np.nansum(_padded(lists), axis=0) if lists else None


def _weighted(
    buckets: Sequence[Any], weight: str, value: str, width: int | None = None
) -> Numbers | None:
    """Mean a bucket over records, weighted by what each counted; NaN for an empty bucket."""
    there = [bucket for bucket in buckets if isinstance(bucket, Mapping)]
    weights = _padded([_list(bucket.get(weight)) for bucket in there])
    values = _padded([_list(bucket.get(value)) for bucket in there])
    if not there or weights.shape != values.shape or not np.nansum(weights) > 0:
        return None
    if width is not None and weights.shape[1] != width:
        return None
    known = ~np.isnan(weights) & ~np.isnan(values)
    total = np.where(known, weights, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Numbers = np.where(known, weights * values, 0.0).sum(axis=0) / total
    return mean
