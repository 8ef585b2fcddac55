"""The same facts as Markdown, and the figures of the first screen as all forms show them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3tune.report.document import Report
from k3tune.report.number_text import figure
from k3tune.report.plot import SECTIONS
from k3tune.report.tabulate import table_of

# What Markdown or HTML would take for more than text.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def fact_lines(run: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, figure and detail of the first screen's facts; those the log has nothing on are left.

    Args:
        run: one of the document's runs.
    """
    now, floor = run["k3"], run["floor"]
    if now:
        yield "KL (k3), now", figure(now["value"]), f"{_range(now)}, last {now['steps']} steps"
    if floor:
        reused = ", measured by an earlier run" if run["floor_reused"] else ""
        yield "floor", figure(floor["value"]), f"{_range(floor)}{reused}"
    for name in ("reward", "loss"):
        if pair := run[name]:
            records = f"{pair['records']} record{'s' * (pair['records'] > 1)}"
            detail = f"from {figure(pair['then'])}; means of {records}"
            yield name, figure(pair["now"]), detail
    yield "steps", figure(run["steps"]), ""
    if run["adapter_version"] is not None:
        yield "adapter version", figure(run["adapter_version"]), ""
    if now:
        masked = run["masked_token_fraction"]
        yield "masked tokens", figure(masked, "%"), f"{figure(run['masked_tokens'])} tokens"
        yield "stale samples", figure(run["stale_samples"]), ""
        yield "alarms", figure(run["alarms"]), ""
    if run["not_finite_tokens"]:
        yield "tokens not finite", figure(run["not_finite_tokens"]), "left out of the KL"
    if run["tokens_per_s"] is not None:
        yield "speed", figure(run["tokens_per_s"]), "tokens/s, median of the last steps"
    if run["peak_memory_bytes"] is not None:
        yield "peak memory", figure(run["peak_memory_bytes"], "bytes"), "of the first process"


def _range(interval: Mapping[str, float]) -> str:
    return f"{figure(interval['low'])} to {figure(interval['high'])} (95\N{NO-BREAK SPACE}%)"


def render_markdown(report: Report) -> str:
    """The report as Markdown; log text is escaped."""
    names = [run["name"] for run in report.facts["runs"]]
    lines = ["# k3tune report"]
    for run in report.facts["runs"]:
        lines += ["", f"## {_text(run['name'])}", "", f"**{_text(run['sentence'])}**", ""]
        if run["explanation"]:
            lines += [_text(run["explanation"]), ""]
        lines += [f"Status: {_text(run['status_text'])}.", ""]
        lines += _table(["fact", "value", ""], [list(fact) for fact in fact_lines(run)])
        lines += ["", *(_text(note) for note in run["notes"])]
    for section in SECTIONS:
        plots = [plot for plot in report.plots if plot.section == section]
        if plots:
            lines += ["", f"## {section}"]
        for plot in plots:
            own = "" if plot.run is None else f" ({_text(names[plot.run])})"
            lines += ["", f"### {plot.title}{own}", "", f"{plot.unit}. {plot.how}", ""]
            lines += _table(*table_of(plot, names))
    for run in report.facts["runs"]:
        if run["worst_tokens"]:
            lines += ["", f"## Worst tokens: {_text(run['name'])}", ""]
            heads = ["step", "token", "text before it", "r", "log p trainer", "log p engine"]
            lines += _table(heads, [_token(token) for token in run["worst_tokens"]])
        if run["alarm_records"]:
            lines += ["", f"## Alarms: {_text(run['name'])}", ""]
            fields = ("step", "alarm", "cause", "text")
            rows = [[str(alarm[name]) for name in fields] for alarm in run["alarm_records"]]
            lines += _table(list(fields), rows)
    return "\n".join(lines) + "\n"


def _token(token: Mapping[str, Any]) -> list[str]:
    numbers = [figure(token[name]) for name in ("r", "logp_train", "logp_rollout")]
    return [figure(token["step"]), token["text"], token["context"], *numbers]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_text(cell) for cell in cells)} |"

    return [line(heads), f"|{' --- |' * len(heads)}", *map(line, rows)]


def _text(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text.replace("\n", " "))
