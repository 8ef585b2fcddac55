"""The measurements as a Markdown table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from timing import Timing

_COLUMNS = (
    "candidate",
    "ms (quartiles)",
    "time / ours",
    "GB/s",
    "of copy",
    "TFLOP/s",
    "of matmul",
    "peak MB",
    "relL2 to ours",
)


@dataclass(frozen=True)
class Row:
    """One candidate in one pass of one shape; ``not_timed`` says why there is no figure."""

    op: str
    shape: str
    pass_name: str
    candidate: str
    timing: Timing | None = None
    ratio_to_ours: float = 0.0
    bytes_per_s: float = 0.0
    bandwidth_fraction: float = 0.0
    flops_per_s: float = 0.0
    arithmetic_fraction: float = 0.0
    peak_bytes: int = 0
    difference: float = 0.0
    not_timed: str = ""


def _cells(row: Row) -> tuple[str, ...]:
    if row.timing is None:
        return (row.candidate, row.not_timed, *[""] * (len(_COLUMNS) - 2))
    quartiles = (
        f"{row.timing.first_quartile_s * 1e3:.3g} to {row.timing.third_quartile_s * 1e3:.3g}"
    )
    arithmetic = (
        (f"{row.flops_per_s / 1e12:.3g}", f"{row.arithmetic_fraction:.0%}")
        if row.flops_per_s
        else ("", "")
    )
    return (
        row.candidate,
        f"{row.timing.median_s * 1e3:.3g} ({quartiles})",
        f"{row.ratio_to_ours:.2f}",
        f"{row.bytes_per_s / 1e9:.3g}",
        f"{row.bandwidth_fraction:.0%}",
        *arithmetic,
        f"{row.peak_bytes / 1e6:.3g}",
        f"{row.difference:.1e}",
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(about: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """The report: the machine, how to read it, and a table for every shape and pass."""
    ceilings = about["ceilings"]
    lines = [
        "# Kernel benchmarks",
        "",
        f"{about['machine']}; torch {about['torch']}, {about['dtype']}; median of "
        f"{about['rounds']} interleaved runs. Command: `{about['command'].strip()}`.",
        "",
        f"Ceilings measured here: copy {ceilings['read_write_bytes'] / 1e9:.0f} GB/s, matmul "
        f"{ceilings['matmul_flops'] / 1e12:.3g} TFLOP/s. GB/s and TFLOP/s count the least bytes "
        "and arithmetic of the op, whatever a candidate does beyond.",
        "",
        *(f"- {op} ran on {backend}" for op, backend in about["backends"].items()),
    ]
    for (op, shape, pass_name), group in groupby(
        rows, lambda row: (row.op, row.shape, row.pass_name)
    ):
        lines += ["", f"## {op}: {shape}, {pass_name}", ""]
        lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        lines += [_line(_cells(row)) for row in group]
    return "\n".join(lines) + "\n"
