"""``k3tune score``: the log-probability of every token of given rows."""

import json
import sys
from pathlib import Path

import typer

from k3tune.commands.loading import insisting_on, load_model, read_architecture
from k3tune.commands.options import Model
from k3tune.files import check_ids, read_id_rows, refuse_same_file, replace_file


def run(model_options: Model, input_file: Path, output_file: Path, batch_size: int) -> None:
    """Read rows, score them, write the file.

    Raises:
        K3TuneError: if a file, the base or the adapter is not usable.
    """
    refuse_same_file(input_file, output_file)
    rows = read_id_rows(input_file)
    with replace_file(output_file) as file:
        vocab_size = read_architecture(model_options.base).vocab_size
        check_ids(rows, vocab_size, f"{input_file} line")
        model = load_model(model_options)
        from k3tune.model.scoring import score_rows

        bar = typer.progressbar(
            length=len(rows), label="scoring", file=sys.stderr, hidden=not sys.stderr.isatty()
        )
        with bar, insisting_on(model_options.kernels):
            scores = score_rows(model, rows, batch_size=batch_size, progress=bar.update)
        file.writelines(json.dumps({"logprobs": logprobs}) + "\n" for logprobs in scores)
    typer.echo(
        f"{output_file}: {len(scores)} rows, {sum(map(len, scores))} tokens scored", err=True
    )
