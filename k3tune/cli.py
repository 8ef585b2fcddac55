"""The ``k3tune`` command. Options are read here, the work is in the library.

Nothing heavy is imported at module level, so that ``--help`` answers at once and a mistyped option
costs no waiting.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3tune.errors import K3TuneError
from k3tune.files import check_ids, parse_ids, read_id_rows, replace_file

if TYPE_CHECKING:
    from k3tune.model.modeling import K3ForCausalLM

app = typer.Typer(
    name="k3tune",
    help="Fine-tune Kimi K3 without ever leaving 4 bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # help texts hold brackets, which markup would eat
    rich_markup_mode=None,
)

Base = Annotated[str, typer.Argument(help="Checkpoint folder, or a hub id such as org/name.")]
DtypeName = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option("--dtype", help="Of the trunk; auto is float32 on a CPU, bfloat16 on a GPU."),
]
Kernels = Annotated[
    Literal["auto", "triton", "reference"], typer.Option(help="Backend of every operation.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that run together.")]


@app.command()
def inspect(
    path: Base,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Count a checkpoint's parameters and bytes, and judge it against Kimi K3's tensor table.

    Config and index are enough. Exits with 1 if a problem was found.
    """
    from k3tune.published.inspection import inspect_checkpoint, inspection_json, render_inspection

    inspection = inspect_checkpoint(path)
    typer.echo(
        json.dumps(inspection_json(inspection), indent=2)
        if as_json
        else render_inspection(inspection)
    )
    if inspection.problems:
        raise typer.Exit(1)


@app.command()
def score(
    base: Base,
    input_file: Annotated[Path, typer.Option("--input", help="JSONL, a list of token ids a line.")],
    output_file: Annotated[
        Path, typer.Option("--out", help='JSONL, {"logprobs": [null, ...]} a line.')
    ],
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
    batch_size: BatchSize = 8,
) -> None:
    """Write the log-probability of every token, given the tokens before it.

    The output appears whole or not at all.
    """
    rows = read_id_rows(input_file)
    with replace_file(output_file) as file:
        model = _load(base, rows, f"{input_file} line", dtype, kernels)
        from k3tune.model.scoring import score_rows

        bar = typer.progressbar(
            length=len(rows), label="scoring", file=sys.stderr, hidden=not sys.stderr.isatty()
        )
        with bar, _insisting_on(kernels):
            scores = score_rows(model, rows, batch_size=batch_size, progress=bar.update)
        file.writelines(json.dumps({"logprobs": logprobs}) + "\n" for logprobs in scores)
    typer.echo(
        f"{output_file}: {len(scores)} rows, {sum(map(len, scores))} tokens scored", err=True
    )


@app.command()
def generate(
    base: Base,
    prompt_ids: Annotated[
        str | None, typer.Option(help='Token ids of one prompt: "1 2 3" or "[1, 2, 3]".')
    ] = None,
    prompt_ids_file: Annotated[
        Path | None, typer.Option(help="JSONL, a list of token ids a line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token, 1 samples the model.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from this probability mass; 1 is all.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 is all.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"prompt_ids", "completion_ids"} a line.')
    ] = False,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
    batch_size: BatchSize = 8,
) -> None:
    """Continue prompts, and print the new token ids, a line a prompt."""
    if (prompt_ids is None) == (prompt_ids_file is None):
        raise K3TuneError("expected one of --prompt-ids and --prompt-ids-file, got both or neither")
    if temperature == 0 and (top_p < 1 or top_k > 0 or seed is not None):
        raise K3TuneError(
            "--top-p, --top-k and --seed need --temperature above 0: without it nothing is sampled"
        )
    if prompt_ids_file is not None:
        prompts, source = read_id_rows(prompt_ids_file), f"{prompt_ids_file} line"
    else:
        prompts, source = [parse_ids(prompt_ids or "", "--prompt-ids")], "--prompt-ids: prompt"
    model = _load(base, prompts, source, dtype, kernels)
    from k3tune.model.sampling import sample_rows

    continuations = sample_rows(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        batch_size=batch_size,
    )
    with _insisting_on(kernels):
        for prompt, ids in zip(prompts, continuations, strict=True):
            as_object = {"prompt_ids": prompt, "completion_ids": ids}
            typer.echo(json.dumps(as_object) if as_json else " ".join(map(str, ids)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error a user can cause is one sentence and exit status 2."""
    try:
        app(args=arguments)
    except K3TuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(2) from None


@contextmanager
def _insisting_on(kernels: str) -> Iterator[None]:
    """Turn what an op says of the backend asked for into an error of the command line."""
    try:
        yield
    except ValueError as error:
        if kernels == "auto" or isinstance(error, K3TuneError):
            raise
        raise K3TuneError(f"--kernels {kernels}: {error}") from error


def _load(
    base: str, rows: list[list[int]], source: str, dtype: str, kernels: str
) -> "K3ForCausalLM":
    """Load the base, after checking ``rows`` against the vocabulary its config states."""
    from k3tune.published.architecture import parse_config, read_config
    from k3tune.published.hub import resolve_checkpoint

    config = read_config(resolve_checkpoint(base, weights=False))
    check_ids(rows, parse_config(config).vocab_size, source)
    import torch

    from k3tune.model.checkpoint import load_base

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return load_base(base, dtype=getattr(torch, dtype), device=device, kernels=kernels)
