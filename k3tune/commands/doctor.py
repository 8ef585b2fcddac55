"""``k3tune doctor``: what this machine can run, and the next step where it cannot."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from k3tune.commands.flags import Json


def doctor(
    base: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder whose disk to measure; else the current folder."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out torch and the self-test: under 3 s.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Look at this machine, and say what to mend.

    Packages, GPUs, network, disk and a self-test: every finding is ok, a warning or a failure,
    with the next step. Exits with 1 on a failure.
    """
    from k3tune.doctor.examination import examine
    from k3tune.doctor.finding import as_json as to_json
    from k3tune.doctor.finding import as_text, worst

    begun = time.perf_counter()
    findings = list(examine(base, quick=quick))
    took_s = time.perf_counter() - begun
    typer.echo(
        json.dumps(to_json(findings, took_s), indent=2) if as_json else as_text(findings, took_s)
    )
    if worst(findings) == "failure":
        raise typer.Exit(1)
