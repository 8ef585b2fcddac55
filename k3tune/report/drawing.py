"""Plots as SVG, drawn by matplotlib; colours are left to the page, so that it can be dark or light.

A figure is drawn in stand-in colours, which become CSS variables: ``--ink`` (text and diagonals),
``--muted`` (axes), ``--line`` (grids), ``--alarm`` and ``--c0`` to ``--c6`` (lines). The lines of
curves and profiles carry the ids ``<plot>-<number>``, under which tests find them.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from k3tune.report.plot import Line, Matrix, Plot

NUM_COLOURS = 7
_STAND_INS = {
    "ink": "#0a0b01",
    "muted": "#0a0b02",
    "line": "#0a0b03",
    "alarm": "#0a0b04",
    **{f"c{number}": f"#0a0b1{number}" for number in range(NUM_COLOURS)},
}
_INCHES = (4.0, 2.35)
_AXES = (0.13, 0.17, 0.83, 0.78)
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "k3tune",
    "text.parse_math": False,
    "font.size": 8,
    "axes.edgecolor": _STAND_INS["muted"],
    "axes.linewidth": 0.6,
    "xtick.color": _STAND_INS["muted"],
    "ytick.color": _STAND_INS["muted"],
    "text.color": _STAND_INS["ink"],
    "axes.labelcolor": _STAND_INS["muted"],
    "path.simplify": False,
}


def colour_of(line: Line, place: int, num_runs: int) -> int:
    """Number of a line's colour: lines of one run differ by it, several runs differ by it."""
    return (line.run if num_runs > 1 else place) % NUM_COLOURS


def dash_of(place: int, num_runs: int) -> int:
    """Number of a line's dash pattern; lines of a single run are all solid."""
    return place % len(_DASHES) if num_runs > 1 else 0


def draw(plot: Plot, num_runs: int) -> str:
    """One plot as an ``<svg>`` element that scales with its container.

    Args:
        plot: what to draw.
        num_runs: runs in the report, by which lines are coloured.
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=_INCHES)
        FigureCanvasSVG(figure)
        axes = figure.add_axes(_AXES)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        _DRAWERS[plot.kind](axes, plot, 1 if plot.run is not None else num_runs)
        axes.set_xlabel(plot.x_axis, loc="right", labelpad=2)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return _for_the_page(written.getvalue(), plot)


def _for_the_page(svg: str, plot: Plot) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    # figures share a page: ids that something points at get the plot's name, others go
    used = set(re.findall(r"#([\w.-]+)", svg))

    def named(found: re.Match[str]) -> str:
        if found[1] in used:
            return f' id="{plot.id}-{found[1]}"'
        return found[0] if found[1].startswith(f"{plot.id}-") else ""

    svg = re.sub(r' id="([^"]*)"', named, svg)
    svg = re.sub(r"#([\w.-]+)", lambda found: f"#{plot.id}-{found[1]}", svg)
    head = f'<svg role="img" aria-labelledby="title-{plot.id}" viewBox='
    svg = re.sub(r"<svg[^>]*?viewBox=", head, svg, count=1)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _curves(axes: Axes, plot: Plot, num_runs: int) -> None:
    positive = _scale(axes, plot)
    for band in plot.bands:
        colour = _STAND_INS[f"c{band.run % NUM_COLOURS}" if num_runs > 1 else "muted"]
        # a floor of exactly 0 has no place on a log axis
        if band.high > 0 or not positive:
            low = band.low if band.low > 0 or not positive else band.high / 10
            axes.axhspan(low, band.high, color=colour, alpha=0.18, linewidth=0)
            if band.value > 0 or not positive:
                axes.axhline(band.value, color=colour, linewidth=0.8, dashes=(4, 2))
    for name, height in plot.limits:
        axes.axhline(height, color=_STAND_INS["muted"], linewidth=0.8, dashes=(4, 2), label=name)
    places: dict[int, int] = {}
    for number, line in enumerate(plot.lines):
        place = places[line.run] = places.get(line.run, -1) + 1
        colour = _STAND_INS[f"c{colour_of(line, place, num_runs)}"]
        x, mean = np.array(line.x), _above_zero(line.mean, positive)
        if line.low is not None and line.high is not None:
            low, high = (_above_zero(part, positive) for part in (line.low, line.high))
            axes.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
        axes.plot(
            x,
            mean,
            color=colour,
            linewidth=1.1,
            linestyle=_DASHES[dash_of(place, num_runs)],
            # a single value is no line
            marker="o" if len(x) == 1 else None,
            markersize=3,
            gid=f"{plot.id}-{number}",
        )
    if plot.marks:
        axes.plot(
            [mark.step for mark in plot.marks],
            [0.97] * len(plot.marks),
            transform=axes.get_xaxis_transform(),
            color=_STAND_INS["alarm"],
            marker="v",
            markersize=3.5,
            linestyle="none",
            clip_on=False,
        )
    _step_axis(axes)
    _finish(axes, plot, positive)


def _stack(axes: Axes, plot: Plot, num_runs: int) -> None:
    parts = axes.stackplot(
        *_together(plot.lines),
        colors=[_STAND_INS[f"c{place % NUM_COLOURS}"] for place in range(len(plot.lines))],
        linewidth=0,
        alpha=0.85,
    )
    for number, part in enumerate(parts):
        part.set_gid(f"{plot.id}-{number}")
    axes.set_ylim(bottom=0)
    _step_axis(axes)
    _finish(axes, plot, False)


def _together(lines: Sequence[Line]) -> tuple[Any, list[Any]]:
    """Lines on the steps of all; a part that a step has no value for counts 0."""
    steps = sorted({step for line in lines for step in line.x})
    rows = []
    for line in lines:
        by_step = dict(zip(line.x, line.mean, strict=True))
        rows.append([by_step.get(step) or 0.0 for step in steps])
    return steps, rows


def _profile(axes: Axes, plot: Plot, num_runs: int) -> None:
    positive = _scale(axes, plot)
    names = list(dict.fromkeys(str(name) for line in plot.lines for name in line.x))
    x_of = {name: place for place, name in enumerate(names)}
    places: dict[int, int] = {}
    for number, line in enumerate(plot.lines):
        place = places[line.run] = places.get(line.run, -1) + 1
        colour = _STAND_INS[f"c{colour_of(line, place, num_runs)}"]
        x = np.array([x_of[str(name)] for name in line.x])
        axes.plot(
            x,
            _above_zero(line.mean, positive),
            color=colour,
            linewidth=1.1,
            linestyle=_DASHES[1 if line.label == "floor" else 0],
            marker="o",
            markersize=2.6,
            gid=f"{plot.id}-{number}",
        )
    axes.set_xlim(-0.6, len(names) - 0.4)
    shown = plot.ticks[:: max(1, -(-len(plot.ticks) // 8))]
    axes.set_xticks([place for place, _ in shown], [name for _, name in shown])
    _finish(axes, plot, positive)


def _intervals(axes: Axes, plot: Plot, num_runs: int) -> None:
    names = list(dict.fromkeys(str(name) for line in plot.lines for name in line.x))[::-1]
    for number, line in enumerate(plot.lines):
        colour = _STAND_INS[f"c{colour_of(line, 0, num_runs)}"]
        # runs stand beside each other, not on each other
        y = np.array([names.index(str(name)) for name in line.x]) - 0.18 * number
        if line.low is not None and line.high is not None:
            axes.hlines(y, line.low, line.high, color=colour, linewidth=2.2, alpha=0.5)
        axes.plot(
            np.array(line.mean, dtype=np.float64),
            y,
            color=colour,
            linestyle="none",
            marker="o",
            markersize=3.5,
            gid=f"{plot.id}-{number}",
        )
    axes.set_position((0.3, 0.17, 0.66, 0.78))
    axes.set_ylim(-0.6 - 0.18 * (len(plot.lines) - 1), len(names) - 0.4)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.yaxis.set_major_formatter(lambda value, _: names[round(value)])
    log = all(low > 0 for line in plot.lines for low in line.low or ())
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_Ticks(log))
    axes.grid(axis="x", color=_STAND_INS["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    _frame(axes)


def _cells(axes: Axes, plot: Plot, num_runs: int) -> None:
    matrix = _matrix(plot)
    values = _masked(matrix)
    _image(axes, plot, values, LogNorm())
    size = len(matrix.rows)
    axes.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color=_STAND_INS["muted"], linewidth=0.7)
    _name_axis(axes.xaxis, matrix.columns, 7, edges=True)
    _name_axis(axes.yaxis, matrix.rows, 7, edges=True)
    _frame(axes)


def _heat(axes: Axes, plot: Plot, num_runs: int) -> None:
    matrix = _matrix(plot)
    values = _masked(matrix)
    low, high = float(values.min()), float(values.max())
    # one value all over would be no colour
    norm = Normalize(low, high if high > low else low + (abs(low) or 1.0))
    image = _image(axes, plot, values, norm)
    bar = axes.inset_axes((1.02, 0.0, 0.025, 1.0))
    axes.set_position((0.13, 0.17, 0.7, 0.78))
    colours = axes.figure.colorbar(image, cax=bar)
    colours.locator = MaxNLocator(4, steps=(1, 2, 5, 10))
    colours.update_ticks()
    colours.outline.set_visible(False)
    bar.yaxis.set_major_formatter(_Ticks())
    bar.tick_params(length=0)
    _name_axis(axes.xaxis, matrix.columns, 5)
    _name_axis(axes.yaxis, matrix.rows, 6)
    _frame(axes)


_DRAWERS = {
    "curves": _curves,
    "stack": _stack,
    "profile": _profile,
    "intervals": _intervals,
    "cells": _cells,
    "heat": _heat,
}


def _image(axes: Axes, plot: Plot, values: Any, norm: Normalize) -> Any:
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="cividis", norm=norm, zorder=2)
    image.set_gid(f"{plot.id}-0")
    return image


def _matrix(plot: Plot) -> Matrix:
    assert plot.matrix is not None, f"{plot.id} has a matrix"
    return plot.matrix


def _masked(matrix: Matrix) -> Any:
    return np.ma.masked_invalid(np.array(matrix.values, dtype=np.float64))


def _scale(axes: Axes, plot: Plot) -> bool:
    """Choose the vertical axis; a log one needs a value above 0."""
    values = [value for line in plot.lines for value in line.mean if value is not None]
    positive = plot.log and any(value > 0 for value in values)
    if positive:
        axes.set_yscale("log")
    return positive


def _above_zero(values: Sequence[float | None], positive: bool) -> Any:
    array = np.array(values, dtype=np.float64)
    return np.where(array > 0, array, np.nan) if positive else array


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.01)


def _name_axis(axis: Any, names: Sequence[str], count: int, edges: bool = False) -> None:
    """Name some places of an axis of categories; of bins by their edges if ``edges``."""
    every = max(1, -(-len(names) // count))
    places = range(0, len(names), every)
    axis.set_major_locator(FixedLocator([place - 0.5 * edges for place in places]))
    axis.set_major_formatter(lambda value, _: names[round(value + 0.5 * edges)])


def _finish(axes: Axes, plot: Plot, log: bool) -> None:
    low, high = axes.get_ylim()
    if plot.bounds:
        low, high = _around(plot, log)
    if log:
        # much less than a decade would leave the axis without two ticks
        if high < 5 * low:
            middle = (low * high) ** 0.5
            low, high = middle / 5**0.5, middle * 5**0.5
        narrow = high < 50 * low
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(_Ticks(log))
    axes.grid(axis="y", color=_STAND_INS["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    _frame(axes)


def _around(plot: Plot, log: bool) -> tuple[float, float]:
    """Ends of a vertical axis that covers a plot's values and its bounds."""
    assert plot.bounds is not None, f"{plot.id} has bounds"
    ends = [*plot.bounds, *(height for _, height in plot.limits)]
    for line in plot.lines:
        for part in (line.mean, line.low or (), line.high or ()):
            ends += [value for value in part if value is not None and (value > 0 or not log)]
    low, high = min(ends), max(ends)
    if log:
        return low / 1.2, high * 1.2
    margin = 0.04 * (high - low)
    # a line at the end of the axis would lie under it
    return low - margin, high + margin


class _Ticks(Formatter):
    """Numbers as short as they can be told apart, such as 1,200 or 0.996 or 5e-7."""

    def __init__(self, log: bool = False) -> None:
        self._log = log

    def __call__(self, value: float, pos: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """All labels of an axis; on a linear one they have equally many decimals."""
        largest = max(map(abs, values), default=0.0)
        powers = self._log or 0 < largest < 2e-3
        for decimals in range(6):
            if not powers and all(abs(round(v, decimals) - v) <= 1e-7 * largest for v in values):
                return [f"{value:,.{decimals}f}" for value in values]
        return [_power(value) for value in values]


def _power(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _frame(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=2, width=0.6, pad=2)
    axes.tick_params(axis="y", length=0)
