"""The report as one HTML file: no network, no script that runs, all text of the log escaped."""

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log10
from typing import Any

from k3tune.report.document import Report
from k3tune.report.drawing import colour_of, dash_of, draw
from k3tune.report.markdown import fact_lines
from k3tune.report.number_text import figure
from k3tune.report.plot import SECTIONS, Plot
from k3tune.report.style import STYLE
from k3tune.report.tabulate import table_of

_TONES = {"at floor": ("good", "●"), "above floor": ("bad", "▲"), "drifting": ("unsure", "◆")}
_QUIET = ("quiet", "○")
_DASH_ARRAYS = ("", "6 3", "2 2", "8 3 2 3")


def render_page(report: Report, refresh_s: int | None = None) -> str:
    """The page.

    Args:
        report: what to show.
        refresh_s: seconds after which a browser loads it again; None for never.
    """
    runs = report.facts["runs"]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.facts["made"]))
    title = escape(", ".join(run["name"] for run in runs))
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">\n' if refresh_s else ""
    several = " several" if len(runs) > 1 else ""
    body = [
        f"<header><h1>k3tune report</h1><span>made {made}</span></header>\n<main>",
        f'<section class="runs{several}">',
        *(_run(run, number, len(runs)) for number, run in enumerate(runs)),
        "</section>",
        *_plots(report),
        *_tables(runs),
        "</main>",
        _footer(report),
        f'<script type="application/json" id="facts">{_embedded(report)}</script>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # nothing of the log can run or fetch, even if an escape were missing
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f"{refresh}<title>{title}: k3tune report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _embedded(report: Report) -> str:
    # the only character that could end the element
    return report.as_json().replace("<", "\\u003c")


def _run(run: Mapping[str, Any], number: int, num_runs: int) -> str:
    tone, sign = _TONES.get(run["verdict"], _QUIET)
    if run["attribution"] and tone in ("good", "quiet"):
        tone, sign = _TONES["drifting"]
    key = f'<span class="key" style="--key: var(--c{number % 7})"></span>' if num_runs > 1 else ""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        + (f"<small>{escape(detail)}</small>" if detail else "")
        + "</dd></div>"
        for name, value, detail in fact_lines(run)
    )
    why = f'<p class="why">{escape(run["explanation"])}</p>' if run["explanation"] else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run["notes"])
    return (
        f'<article class="run {tone}">'
        f'<p class="name">{key}{escape(run["name"])}: {escape(run["status_text"])}</p>'
        f'<h2 class="verdict" id="verdict-{number}"><span class="sign" aria-hidden="true">{sign}'
        f"</span>{escape(run['sentence'])}</h2>{why}{_strip(run)}"
        f'<dl class="facts">{facts}</dl>{notes}</article>'
    )


def _strip(run: Mapping[str, Any]) -> str:
    """The run's interval above the floor's, on one log scale; the figures stand beside it."""
    now, floor = run["k3"], run["floor"]
    ends = [part[end] for part in (now, floor) if part for end in ("low", "value", "high")]
    if not (now and floor) or min(ends) <= 0:
        return ""
    low, high = min(ends) / 2, max(ends) * 2
    width = _decades(high, low)
    rows = []
    for name, label, part in (("now", "this run", now), ("floor", "floor", floor)):
        left = 100 * _decades(part["low"], low) / width
        size = 100 * _decades(part["high"], part["low"]) / width
        rows.append(
            f'<div class="{name}"><span>{label}</span><span class="track"><span class="range" '
            f'style="left: {left:.2f}%; width: {size:.2f}%"></span></span></div>'
        )
    return f'<div class="strip" aria-hidden="true">{"".join(rows)}</div>'


def _decades(high: float, low: float) -> float:
    return log10(high / low)


def _plots(report: Report) -> Iterator[str]:
    names = [run["name"] for run in report.facts["runs"]]
    for section in SECTIONS:
        plots = [plot for plot in report.plots if plot.section == section]
        if plots:
            yield f'<section><h2>{section}</h2><div class="grid">'
            yield from (_figure(plot, names) for plot in plots)
            yield "</div></section>"


def _figure(plot: Plot, names: Sequence[str]) -> str:
    own = "" if plot.run is None else f" ({escape(names[plot.run])})"
    scale = ", log axis" if plot.log and plot.kind != "cells" else ""
    heads, rows = table_of(plot, names)
    return (
        f'<figure id="plot-{plot.id}"><h3 id="title-{plot.id}">{escape(plot.title)}{own}</h3>'
        f"<p>{escape(plot.unit)}{scale}</p>{draw(plot, len(names))}{_keys(plot, names)}"
        f"<figcaption>{escape(plot.how)}{_unseen(plot)}</figcaption>"
        f"<details><summary>Table</summary>{_table(heads, rows)}</details></figure>"
    )


def _unseen(plot: Plot) -> str:
    """What a log axis leaves out."""
    values = [value for line in plot.lines for value in line.mean if value is not None]
    below = min(values, default=1) <= 0 < max(values, default=1)
    hidden = plot.log and plot.kind == "curves" and below
    return " Zeros have no place on its axis." if hidden else ""


def _keys(plot: Plot, names: Sequence[str]) -> str:
    """What the lines are: by colour, or by colour and dash where there are several runs."""
    num_runs = 1 if plot.run is not None else len(names)
    items = []
    places: dict[int, int] = {}
    for line in plot.lines:
        place = places[line.run] = places.get(line.run, -1) + 1
        dash = 1 if line.label == "floor" else dash_of(place, num_runs)
        label = line.label if num_runs == 1 else f"{names[line.run]}: {line.label}"
        items.append(_key(colour_of(line, place, num_runs), dash, label))
    if plot.bands:
        items.append(_key(None, 1, "floor"))
    items += [_key(None, 1, name) for name, _ in plot.limits]
    if len(items) < 2 and num_runs == 1:
        return ""
    return f'<ul class="keys">{"".join(items)}</ul>'


def _key(colour: int | None, dash: int, label: str) -> str:
    stroke = "var(--muted)" if colour is None else f"var(--c{colour})"
    dashes = f' stroke-dasharray="{_DASH_ARRAYS[dash]}"' if _DASH_ARRAYS[dash] else ""
    return (
        '<li><svg viewBox="0 0 24 8" aria-hidden="true"><path d="M0 4H24" fill="none" '
        f'stroke="{stroke}" stroke-width="2.5"{dashes}/></svg>{escape(label)}</li>'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A table; columns whose places are in ``texts`` hold text of the log."""

    def cell(place: int, value: str) -> str:
        if place in texts:
            return f'<td class="text"><code>{escape(value)}</code></td>'
        return f"<td>{escape(value)}</td>"

    head = "".join(
        f'<th scope="col"{" class=text" if place in texts else ""}>{escape(name)}</th>'
        for place, name in enumerate(heads)
    )
    body = "".join(
        f"<tr>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _tables(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for run in runs:
        own = f" ({escape(run['name'])})" if len(runs) > 1 else ""
        if run["worst_tokens"]:
            yield f'<section class="wide"><h2>Worst tokens{own}</h2>'
            yield _worst_tokens(run["worst_tokens"])
            yield f"<h2>Samples they stand in{own}</h2>{_worst_samples(run['worst_samples'])}"
            yield "</section>"
        if run["alarm_records"]:
            words = ("alarm", "cause", "text")
            rows = [
                [figure(alarm["step"]), *(str(alarm[word] or "") for word in words)]
                for alarm in run["alarm_records"]
            ]
            count = run["alarms"]
            title = f"Alarms{own}" + (f", the last {len(rows)} of {count}" * (count > len(rows)))
            yield f'<section class="wide"><h2>{title}</h2>'
            yield _table(["step", "alarm", "cause", "what it says"], rows, texts=[3])
            yield "</section>"
        if run["options"]:
            rows = [[name, _option(value)] for name, value in run["options"].items()]
            table = _table(["option", "value"], rows, texts=[1])
            yield f'<section class="wide"><h2>Options{own}</h2>{table}</section>'


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _worst_tokens(tokens: Sequence[Mapping[str, Any]]) -> str:
    heads = ["step", "token", "text before it", "r", "log p trainer", "log p engine"]
    heads += ["position", "sample", "id"]
    rows = [
        [figure(token["step"]), token["text"], token["context"]]
        + [figure(token[name]) for name in ("r", "logp_train", "logp_rollout")]
        + [figure(token[name]) for name in ("position", "sample", "token_id")]
        for token in tokens
    ]
    return _table(heads, rows, texts=[1, 2])


def _worst_samples(samples: Sequence[Mapping[str, Any]]) -> str:
    heads = ["step", "sample", "prompt", "tokens listed", "sum of |r|", "text"]
    rows = [
        [figure(sample[name]) for name in ("step", "sample", "prompt", "tokens", "abs_r_sum")]
        + [sample["text"]]
        for sample in samples
    ]
    return _table(heads, rows, texts=[5])


def _footer(report: Report) -> str:
    logs = "; ".join(escape(run["path"]) for run in report.facts["runs"])
    missing = report.facts["missing"]
    left = f"<p>Not in the log: {escape(', '.join(missing))}.</p>" if missing else ""
    version = escape(report.facts["k3tune"])
    return f"<footer>{left}<p>Read from {logs} by k3tune {version}.</p></footer>"
