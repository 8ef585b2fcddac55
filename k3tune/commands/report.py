"""``k3tune report``: what a run's log says."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tune.errors import K3TuneError

if TYPE_CHECKING:
    from k3tune.report.document import Report

_NEEDED = ("matplotlib", "numpy", "orjson")
_FILE_NAME = "report.html"
_LEAST_WAIT_S = 5.0


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Output folders of runs, or their logs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write; without it report.html in the first run's folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the facts as JSON; HTML only with --out.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--md", help="Print the facts as Markdown; HTML only with --out.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again and again until the runs have ended.")
    ] = False,
) -> None:
    """Write a page about runs: KL against its floor, learning.

    It works on runs that have crashed, too, and on ones still under way. Several runs are shown
    side by side.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise K3TuneError(
            f"the report needs {' and '.join(missing)}, which is not installed: "
            'pip install "k3tune[report]"'
        )
    if as_json and as_markdown:
        raise K3TuneError("--json and --md were both given, expected one: only one can be printed")
    if watch and (as_json or as_markdown):
        raise K3TuneError("--watch writes HTML again and again, expected it without --json or --md")
    from k3tune.report.document import build_report

    target = out
    if target is None and not (as_json or as_markdown):
        folder = runs[0] if runs[0].is_dir() else runs[0].parent
        target = folder / _FILE_NAME
    if target is not None:
        _refuse_inputs(runs, target)
    while True:
        begun = time.monotonic()
        made = build_report(runs)
        wait_s = max(_LEAST_WAIT_S, 5 * (time.monotonic() - begun))
        again = watch and made.running
        if target is not None:
            _write(made, target, round(wait_s) if again else None)
        _say(made, target, as_json, as_markdown)
        if not again:
            return
        try:
            time.sleep(wait_s)
        # the usual way to stop watching
        except KeyboardInterrupt:
            return


def _refuse_inputs(runs: list[Path], target: Path) -> None:
    """The page takes the place of no file that it is made from."""
    from k3tune.files import refuse_same_file
    from k3tune.report.reading import files_of_run

    for run in runs:
        for read in files_of_run(run):
            refuse_same_file(read, target)


def _write(made: "Report", target: Path, refresh_s: int | None) -> None:
    from k3tune.files import replace_file
    from k3tune.report.page import render_page

    with replace_file(target) as file:
        file.write(render_page(made, refresh_s))


def _say(made: "Report", target: Path | None, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        typer.echo(made.as_json(indent=True))
    elif as_markdown:
        from k3tune.report.markdown import render_markdown

        typer.echo(render_markdown(made), nl=False)
    else:
        lines = [f"{run['name']}: {run['sentence']}" for run in made.facts["runs"]]
        typer.echo("\n".join([*lines, str(target)]))
