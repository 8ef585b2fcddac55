"""What a plot holds: plain data that is drawn, tabulated and written as JSON."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["curves", "stack", "profile", "intervals", "cells", "heat"]


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        run: number of the run it belongs to.
        name: the log's name of what it shows.
        label: the same for people.
        x: steps, or names of buckets.
        mean: the values; None where there is none.
        low, high: least and largest of what a point stands for, or an interval's bounds; None if
            points stand for themselves.
    """

    run: int
    name: str
    label: str
    x: list[int] | list[str]
    mean: list[float | None]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Band:
    """A floor across a plot: an estimate and its 95 % bounds."""

    run: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """An alarm at a step."""

    run: int
    step: int
    text: str


@dataclass(frozen=True)
class Matrix:
    """Values by two axes; ``rows`` from the bottom up."""

    row_axis: str
    column_axis: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    unit: str


@dataclass(frozen=True)
class Plot:
    """A plot of one or several runs.

    Attributes:
        id: unique in a report.
        section: heading it stands under.
        title: what is shown.
        unit: of the values.
        how: a sentence or two on how to read it.
        kind: how it is drawn.
        x_axis: name of the horizontal axis.
        log: whether values stand on a log axis.
        lines, bands, marks, limits, matrix: what is drawn; ``limits`` are lines of a named height.
        run: number of the run it belongs to; None if it shows all.
        ticks: of a profile: places on its axis, counted in buckets from 0, and their names.
        bounds: what the vertical axis covers at least.
    """

    id: str
    section: str
    title: str
    unit: str
    how: str
    kind: Kind
    x_axis: str = "optimizer step"
    log: bool = False
    lines: tuple[Line, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    matrix: Matrix | None = None
    run: int | None = None
    ticks: tuple[tuple[float, str], ...] = ()
    bounds: tuple[float, float] | None = None


SECTIONS = ("Trainer against engine", "Learning", "Machine")
