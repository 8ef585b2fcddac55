"""Plots as tables, for those who cannot see them."""

from collections.abc import Sequence
from typing import Any

from k3tune.report.number_text import figure
from k3tune.report.plot import Line, Matrix, Plot

_MAX_ROWS = 20
_MAX_COLUMNS = 6

Table = tuple[list[str], list[list[str]]]


def table_of(plot: Plot, run_names: Sequence[str]) -> Table:
    """Names of the columns, and rows of text.

    A long curve has every n-th of its points and the last; a matrix every n-th column.

    Args:
        plot: what to tabulate.
        run_names: names of the report's runs; lines are told apart by them where there are several.
    """
    if plot.matrix is not None:
        return _of_cells(plot.matrix) if plot.kind == "cells" else _of_matrix(plot.matrix)
    several = len({line.run for line in plot.lines}) > 1
    heads = [
        f"{run_names[line.run]}: {line.label}" if several else line.label for line in plot.lines
    ]
    ranged = any(line.low is not None for line in plot.lines)
    xs = list(dict.fromkeys(x for line in plot.lines for x in line.x))
    if plot.kind in ("curves", "stack"):
        xs = _some(sorted(xs, key=float), _MAX_ROWS)
    columns = [{x: place for place, x in enumerate(line.x)} for line in plot.lines]
    rows = []
    for x in xs:
        cells = [_cell(line, of.get(x)) for line, of in zip(plot.lines, columns, strict=True)]
        if any(cells):
            rows.append([f"{x:,}" if isinstance(x, int) else x, *cells])
    x_head = f"{plot.x_axis}, up to" if ranged and plot.kind == "curves" else plot.x_axis
    return [x_head, *heads], rows


def _cell(line: Line, place: int | None) -> str:
    if place is None or line.mean[place] is None:
        return ""
    text = figure(line.mean[place])
    if line.low is not None and line.high is not None:
        text += f" ({figure(line.low[place])} to {figure(line.high[place])})"
    return text


def _of_matrix(matrix: Matrix) -> Table:
    shown = _some(range(len(matrix.columns)), _MAX_COLUMNS)
    heads = [matrix.row_axis, *(f"step {matrix.columns[place]}" for place in shown)]
    rows = [
        [name, *(figure(values[place]) for place in shown)]
        for name, values in zip(matrix.rows, matrix.values, strict=True)
    ]
    return heads, rows


def _of_cells(matrix: Matrix) -> Table:
    """By bins of the engine, where the trainer's values lie."""
    heads = [f"{matrix.column_axis}, from", matrix.unit, "same bin", "trainer lower", "higher"]
    rows = []
    for place, name in enumerate(matrix.columns):
        column = [values[place] or 0.0 for values in matrix.values]
        total = sum(column)
        if total:
            parts = (column[place], sum(column[:place]), sum(column[place + 1 :]))
            rows.append([name, figure(total), *(figure(part / total, "%") for part in parts)])
    return heads, rows


def _some(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
