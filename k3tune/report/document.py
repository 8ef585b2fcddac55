"""The facts of a report, gathered once; page, Markdown and JSON show these and no others."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

import k3tune
from k3tune.report.curves import CURVES, curve_plots
from k3tune.report.distributions import distribution_plots
from k3tune.report.plot import SECTIONS, Plot
from k3tune.report.reading import Run, read_run, status
from k3tune.report.verdict import headline, judge
from k3tune.report.worst import worst_samples, worst_tokens

SCHEMA = 1
_MAX_ALARMS = 50
_ALARM_FIELDS = ("step", "alarm", "cause", "text", "value", "limit")
# Enough to tell a run by; the rest is in its config file.
_SHOWN_OPTIONS = (
    "base",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "learning_rate",
    "max_steps",
    "num_generations",
    "temperature",
    "top_p",
    "max_length",
    "max_completion_length",
    "seed",
)


class Report:
    """What a report shows.

    Attributes:
        facts: JSON values: ``schema``, ``k3tune``, ``made`` (seconds since 1970), ``runs``,
            ``plots`` (see :class:`~k3tune.report.plot.Plot`) and ``missing`` (titles of plots that
            the logs have no numbers for).
        plots: the plots, in the order of their sections.
    """

    def __init__(self, facts: dict[str, Any], plots: Sequence[Plot]) -> None:
        self.facts = facts
        self.plots = tuple(plots)

    def as_json(self, *, indent: bool = False) -> str:
        """The facts as JSON text."""
        option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
        return orjson.dumps(self.facts, default=str, option=option).decode()

    @property
    def running(self) -> bool:
        """Whether a run may still write."""
        return any(run["status"] in ("running", "empty") for run in self.facts["runs"])


def build_report(paths: Sequence[str | Path], now: float | None = None) -> Report:
    """Read runs and gather what their logs say.

    Args:
        paths: output folders or logs, at least one.
        now: seconds since 1970; None asks the clock.

    Raises:
        K3TuneError: if a log is not there, or none of this version.
    """
    now = time.time() if now is None else now
    runs = [read_run(path) for path in paths]
    plots = [*curve_plots(runs), *distribution_plots(runs)]
    titles = {plot.title for plot in plots}
    plots.sort(key=lambda plot: SECTIONS.index(plot.section))
    facts = {
        "schema": SCHEMA,
        "k3tune": k3tune.__version__,
        "made": now,
        "runs": [_run(run, name, now) for run, name in zip(runs, _names(runs), strict=True)],
        "plots": [asdict(plot) for plot in plots],
        "missing": [spec.title for spec in CURVES if spec.title not in titles],
    }
    return Report(facts, plots)


def _names(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the folders' names that tell the runs apart."""
    folders = [run.path.resolve().parent for run in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, start=1)]


def _run(run: Run, name: str, now: float) -> dict[str, Any]:
    word, sentence = status(run, now)
    start = run.starts[-1] if run.starts else {}
    return {
        "name": name,
        "path": str(run.path),
        "status": word,
        "status_text": sentence,
        **asdict(judge(run)),
        **headline(run),
        "alarm_records": [
            {field: record.get(field) for field in _ALARM_FIELDS}
            for record in run.alarms[-_MAX_ALARMS:]
        ],
        "notes": run.notes,
        "worst_tokens": worst_tokens(run),
        "worst_samples": worst_samples(run),
        "options": {key: run.config[key] for key in _SHOWN_OPTIONS if key in run.config},
        "floor_key": (run.floor or {}).get("key"),
        "started": {
            key: start.get(key) for key in ("git_commit", "versions", "device", "processes")
        },
    }
