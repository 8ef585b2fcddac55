"""The ``k3tune`` command. Options are read here, the work is in ``k3tune.commands``.

Nothing heavy is imported at module level, so that ``--help`` answers at once and a mistyped option
costs no waiting.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from k3tune.commands.doctor import doctor
from k3tune.commands.export import export, import_, verify
from k3tune.commands.flags import Adapter, Base, DtypeName, Json, Kernels
from k3tune.commands.placement import placement
from k3tune.commands.plan import plan
from k3tune.commands.report import report
from k3tune.commands.serve import serve
from k3tune.errors import K3TuneError

app = typer.Typer(
    name="k3tune",
    help="Fine-tune Kimi K3 without ever leaving 4 bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # help texts hold brackets, which markup would eat
    rich_markup_mode=None,
)

BatchSize = Annotated[int, typer.Option(min=1, help="Rows that run together.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest continuation, in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token, 1 samples the model.")
]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from this probability mass; 1 is all.")
]
TopK = Annotated[int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 is all.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of the sampling.")]
Thinking = Annotated[
    bool, typer.Option("--thinking/--no-thinking", help="Whether answers have a think channel.")
]
ThinkingEffort = Annotated[
    Literal["low", "high", "max", "none"],
    typer.Option(help="How much to think, said in the prompt; none says nothing."),
]


@app.command()
def inspect(
    path: Base,
    as_json: Json = False,
) -> None:
    """Count a checkpoint's bytes, and judge its tensors.

    They are held against Kimi K3's table of tensors; config and index are enough. Exits with 1 if
    a problem was found.
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
    adapter: Adapter = None,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
    batch_size: BatchSize = 8,
) -> None:
    """Write the log-probability of every token.

    Each is given the tokens of its row before it. The output appears whole or not at all.
    """
    from k3tune.commands.options import Model
    from k3tune.commands.score import run

    run(Model(base, adapter, dtype, kernels), input_file, output_file, batch_size)


@app.command()
def generate(
    base: Base,
    prompt: Annotated[
        str | None, typer.Option(help="Text of one user message, or with --raw any text.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            help='A conversation, [{"role": "user", "content": "Hi"}] or {"messages": [...], '
            '"tools": [...]}; or JSONL, one a line.'
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help='Token ids of one prompt: "1 2 3" or "[1, 2, 3]".')
    ] = None,
    prompt_ids_file: Annotated[
        Path | None, typer.Option(help="JSONL, a list of token ids a line.")
    ] = None,
    adapter: Adapter = None,
    thinking: Thinking = True,
    thinking_effort: ThinkingEffort = "max",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without a chat.")
    ] = False,
    show_thinking: Annotated[
        bool, typer.Option("--show-thinking", help="Print the reasoning too, on stderr.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print ids, text, the answer's parts and why it ended."),
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
    batch_size: BatchSize = 8,
) -> None:
    """Answer text or conversations, or continue ids.

    Text is put into Kimi K3's chat format with the base's tokenizer, and the answer's content is
    printed. Ids are continued as they are, and ids come out, a line a prompt.
    """
    from k3tune.commands.generate import Output, Prompts, run
    from k3tune.commands.options import Chat, Model, Sampling

    chat = None if raw else Chat(thinking, thinking_effort)
    run(
        Model(base, adapter, dtype, kernels),
        Prompts(prompt, messages, prompt_ids, prompt_ids_file, chat),
        Sampling(max_new_tokens, temperature, top_p, top_k, seed),
        Output(as_json, show_thinking),
        batch_size,
    )


@app.command()
def chat(
    base: Base,
    adapter: Adapter = None,
    system: Annotated[
        str | None, typer.Option(help="Text of a system message before the first turn.")
    ] = None,
    thinking: Thinking = True,
    thinking_effort: ThinkingEffort = "max",
    show_thinking: Annotated[
        bool,
        typer.Option(
            "--show-thinking/--hide-thinking", help="Stream the reasoning too, on stderr."
        ),
    ] = True,
    max_new_tokens: MaxNewTokens = 4096,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Talk to a base, with an adapter or without.

    Lines of a pipe are turns, too. /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C
    stops an answer.
    """
    from k3tune.commands.chat import run
    from k3tune.commands.options import Chat, Model, Sampling

    run(
        Model(base, adapter, dtype, kernels),
        Chat(thinking, thinking_effort),
        Sampling(max_new_tokens, temperature, top_p, top_k, seed),
        system,
        show_thinking,
    )


app.command()(export)
app.command(name="import")(import_)
app.command()(verify)
app.command()(serve)
app.command()(plan)
app.command()(placement)
app.command()(report)
app.command()(doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error a user can cause is one sentence and exit status 2."""
    try:
        app(args=arguments)
    except K3TuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(2) from None
