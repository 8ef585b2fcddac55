"""Arguments and flags that several commands have, as typer reads them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Base = Annotated[
    str,
    typer.Argument(metavar="BASE", help="Checkpoint folder, or a hub id such as org/name."),
]
Adapter = Annotated[
    Path | None, typer.Option(help="Adapter folder to load over the base, k3tune's or PEFT's.")
]
DtypeName = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(
        "--dtype", help="Of what is no expert; auto is float32 on a CPU, bfloat16 on a GPU."
    ),
]
Kernels = Annotated[
    Literal["auto", "triton", "cpu", "reference"], typer.Option(help="Backend of every operation.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
