"""``k3tune generate``: continue token ids, a text, or conversations."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from k3tune.commands.conversations import Conversation, read_conversations
from k3tune.commands.loading import (
    insisting_on,
    load_model,
    load_tokenizer,
    read_architecture,
    warn,
)
from k3tune.commands.options import Chat, Model, Sampling
from k3tune.data.errors import DataError
from k3tune.errors import K3TuneError
from k3tune.files import check_ids, parse_ids, read_id_rows

if TYPE_CHECKING:
    from k3tune.data.answers import Answer
    from k3tune.data.tokenizer import K3Tokenizer

_SOURCES = ("--prompt", "--messages", "--prompt-ids", "--prompt-ids-file")
_NOTES = 3


@dataclass(frozen=True)
class Prompts:
    """What the user gave; exactly one of the first four.

    ``chat`` is None for text that is continued as it stands.
    """

    text: str | None
    messages_file: Path | None
    ids: str | None
    ids_file: Path | None
    chat: Chat | None

    def __post_init__(self) -> None:
        values = (self.text, self.messages_file, self.ids, self.ids_file)
        given = [name for name, value in zip(_SOURCES, values, strict=True) if value is not None]
        if len(given) != 1:
            raise K3TuneError(
                f"expected one of {', '.join(_SOURCES)}, got {' and '.join(given) or 'none'}"
            )
        if self.chat is None and self.text is None:
            raise K3TuneError(f"--raw goes with --prompt, got it with {given[0]}")

    @property
    def are_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return self.text is not None or self.messages_file is not None


@dataclass(frozen=True)
class Output:
    """What is printed."""

    as_json: bool = False
    show_thinking: bool = False


def run(
    model_options: Model, prompts: Prompts, sampling: Sampling, output: Output, batch_size: int
) -> None:
    """Continue the prompts and print what comes, in their order.

    Raises:
        K3TuneError: if a prompt, the base or the adapter is not usable.
    """
    architecture = None
    tokenizer: K3Tokenizer | None = None
    if prompts.are_text:
        conversations = _conversations(prompts)
        architecture = read_architecture(model_options.base)
        otherwise = "give token ids with --prompt-ids"
        tokenizer = load_tokenizer(model_options.base, architecture, otherwise)
        rows = [_encode(tokenizer, conversation, prompts.chat) for conversation in conversations]
    else:
        rows, source = _ids(prompts)
        check_ids(rows, read_architecture(model_options.base).vocab_size, source)
    model = load_model(model_options)
    from k3tune.model.sampling import sample_rows

    stops = stop_ids(model, tokenizer)
    model.generation_config.eos_token_id = stops
    continuations = sample_rows(model, rows, batch_size=batch_size, **asdict(sampling))
    with insisting_on(model_options.kernels):
        for row, ids in zip(rows, continuations, strict=True):
            result: dict[str, Any] = {"prompt_ids": row, "completion_ids": ids}
            result["finish_reason"] = "stop" if ids and ids[-1] in stops else "length"
            if tokenizer is None:
                typer.echo(json.dumps(result) if output.as_json else " ".join(map(str, ids)))
            else:
                _print_text(result, tokenizer, prompts.chat, output)


def stop_ids(model: Any, tokenizer: "K3Tokenizer | None") -> list[int]:
    """Ids that end a generation, by the base's config and by its tokenizer."""
    eos = model.generation_config.eos_token_id
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return list(dict.fromkeys([*stops, *(tokenizer.stop_token_ids if tokenizer else ())]))


def warn_of_markup(answer: "Answer") -> None:
    """Say what is malformed, the first of it where it is much."""
    more = len(answer.malformed) - _NOTES
    if answer.malformed:
        said = "; ".join(answer.malformed[:_NOTES]) + (f"; and {more} more" if more > 0 else "")
        warn(f"the answer's markup is malformed: {said}")


def _ids(prompts: Prompts) -> tuple[list[list[int]], str]:
    if prompts.ids_file is not None:
        return read_id_rows(prompts.ids_file), f"{prompts.ids_file} line"
    return [parse_ids(prompts.ids or "", "--prompt-ids")], "--prompt-ids: prompt"


def _conversations(prompts: Prompts) -> list[Conversation]:
    if prompts.messages_file is not None:
        return read_conversations(prompts.messages_file)
    if not prompts.text:
        raise K3TuneError("--prompt is empty, expected text")
    return [Conversation([{"role": "user", "content": prompts.text}], None, "--prompt")]


def _encode(tokenizer: "K3Tokenizer", conversation: Conversation, chat: Chat | None) -> list[int]:
    from k3tune.data.chat import render_chat

    if chat is None:
        return tokenizer.encode_text(conversation.messages[0]["content"])
    try:
        return render_chat(
            conversation.messages,
            tokenizer,
            tools=conversation.tools,
            add_generation_prompt=True,
            **chat.rendering,
        ).input_ids
    except DataError as error:
        raise K3TuneError(f"{conversation.place}: {error}") from error


def _print_text(
    result: dict[str, Any], tokenizer: "K3Tokenizer", chat: Chat | None, output: Output
) -> None:
    from k3tune.data.answers import read_answer

    ids: Sequence[int] = result["completion_ids"]
    ended = result["finish_reason"] == "stop"
    said = ids[:-1] if ended else ids
    result["text"] = tokenizer.decode_bytes(said).decode("utf-8", "replace")
    if not ended:
        warn(f"cut after {len(ids)} tokens: raise --max-new-tokens for more")
    if chat is None:
        typer.echo(json.dumps(result) if output.as_json else result["text"])
        return
    answer = read_answer(ids, tokenizer, thinking=chat.thinking)
    if output.as_json:
        result["answer"] = {**answer.message, "malformed": answer.malformed}
        typer.echo(json.dumps(result))
        return
    if output.show_thinking and answer.reasoning:
        typer.secho(answer.reasoning, dim=True, err=True)
    typer.echo(answer.content)
    for call in answer.message.get("tool_calls", ()):
        typer.echo(f"tool call: {json.dumps(call['function'], ensure_ascii=False)}")
    warn_of_markup(answer)
