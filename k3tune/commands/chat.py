"""``k3tune chat``: a conversation in the terminal, or one turn a line of a pipe."""

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from k3tune.commands.generate import stop_ids, warn_of_markup
from k3tune.commands.loading import (
    insisting_on,
    load_model,
    load_tokenizer,
    read_architecture,
    warn,
)
from k3tune.commands.options import Chat, Model, Sampling
from k3tune.errors import K3TuneError

if TYPE_CHECKING:
    from k3tune.data.answers import Answer, Piece
    from k3tune.data.tokenizer import K3Tokenizer
    from k3tune.model.cache import K3Cache
    from k3tune.model.modeling import K3ForCausalLM

_COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"
# a path or a fraction that somebody asks about is no command
_COMMAND = re.compile(r"/\w*")


class Session:
    """A conversation with a model: its messages, and the cache of the tokens it has read.

    Args:
        model: in eval mode.
        tokenizer: of the base.
        chat: how messages are rendered.
        sampling: how tokens are chosen; its seed is set once, before the first token.
        system: content of a system message that opens every conversation; None for none.
    """

    def __init__(
        self,
        model: "K3ForCausalLM",
        tokenizer: "K3Tokenizer",
        chat: Chat,
        sampling: Sampling,
        system: str | None = None,
    ) -> None:
        import torch

        self._model, self._tokenizer = model, tokenizer
        self._chat, self._system = chat, system
        self._options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            self._options = {"do_sample": True, "temperature": sampling.temperature}
            self._options |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        self._options["max_new_tokens"] = sampling.max_new_tokens
        self._options["eos_token_id"] = stop_ids(model, tokenizer)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, Any]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self._forget()

    def ask(self, text: str, show: "Callable[[Piece], None]") -> "Answer":
        """Say something, and stream the answer into ``show`` piece by piece.

        ``KeyboardInterrupt`` stops the answer; what was said until then joins the conversation.

        Returns:
            The answer. Its tool calls, which nobody here can run, do not join the conversation.
        """
        from k3tune.data.answers import AnswerReader
        from k3tune.data.chat import render_chat

        self.messages.append({"role": "user", "content": text})
        rendered = render_chat(
            self.messages, self._tokenizer, add_generation_prompt=True, **self._chat.rendering
        )
        reader = AnswerReader(self._tokenizer, thinking=self._chat.thinking)

        def read(token: int) -> None:
            piece = reader.feed(token)
            if piece is not None:
                show(piece)

        try:
            self._generate(rendered.input_ids, read)
        except KeyboardInterrupt:
            # some layers' caches may hold a token that others do not
            self._forget()
        answer = reader.answer()
        message = answer.message
        message.pop("tool_calls", None)
        if not self._chat.thinking:
            # a channel the model opened uncalled for has no place in the next prompt
            message.pop("reasoning_content", None)
        self.messages.append(message)
        return answer

    @property
    def num_cached(self) -> int:
        """Tokens of the conversation that the model need not read again."""
        return 0 if self._cache is None else self._cache.get_seq_length()

    def _forget(self) -> None:
        self._cache: K3Cache | None = None
        self._read: list[int] = []

    def _generate(self, prompt: list[int], read: Callable[[int], None]) -> None:
        import torch

        from k3tune.model.cache import K3Cache

        # what the model wrote may be rendered with other tokens, which it has not read
        if self._cache is None or prompt[: len(self._read)] != self._read:
            self._cache = K3Cache(self._model.model.architecture)
        ids_BT = torch.tensor([prompt], device=self._model.device)
        output = self._model.generate(
            input_ids=ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            cache=self._cache,
            streamer=_Streamer(read),
            pad_token_id=0,
            **self._options,
        )
        self._read = output[0, : self._cache.get_seq_length()].tolist()


class _Streamer:
    """What ``generate`` calls with the prompt and then with every token."""

    def __init__(self, read: Callable[[int], None]) -> None:
        self._read = read
        self._after_prompt = False

    def put(self, value: Any) -> None:
        """Take the next token; the first call brings the prompt."""
        if self._after_prompt:
            self._read(int(value))
        self._after_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


def run(
    model_options: Model,
    chat: Chat,
    sampling: Sampling,
    system: str | None,
    show_thinking: bool,
) -> None:
    """Answer lines of stdin until it ends or says ``/quit``.

    Contents go to stdout, everything else to stderr.

    Raises:
        K3TuneError: if the base, the adapter or a line is not usable.
    """
    tokenizer = load_tokenizer(model_options.base, read_architecture(model_options.base))
    session = Session(load_model(model_options), tokenizer, chat, sampling, system)
    interactive = sys.stdin.isatty()
    if interactive:
        # editing and history of what is typed
        import readline  # noqa: F401

        typer.echo(_COMMANDS, err=True)
    while (line := _next_line(interactive)) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            session.reset()
            typer.echo("the conversation is forgotten", err=True)
        elif _COMMAND.fullmatch(line):
            typer.echo(f"{line} is no command: {_COMMANDS}", err=True)
        elif line:
            with insisting_on(model_options.kernels):
                _answer(session, line, show_thinking)


def _next_line(interactive: bool) -> str | None:
    """The next line without the space around it; None at the end of the input.

    Raises:
        K3TuneError: if it is no text.
    """
    while True:
        try:
            return input("> " if interactive else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves", err=True)
        except UnicodeDecodeError as error:
            raise K3TuneError(f"the input is no UTF-8 ({error}), expected lines of text") from error


def _answer(session: Session, text: str, show_thinking: bool) -> None:
    shown = None

    def show(piece: "Piece") -> None:
        nonlocal shown
        if piece.channel == "think" and not show_thinking:
            return
        if shown == "think" and piece.channel == "response":
            typer.echo(err=True)
        shown = piece.channel
        thinks = piece.channel == "think"
        typer.secho(piece.text, nl=False, dim=thinks or None, err=thinks)
        (sys.stderr if thinks else sys.stdout).flush()

    answer = session.ask(text, show)
    if shown == "think":
        typer.echo(err=True)
    typer.echo()
    warn_of_markup(answer)
    if not answer.ended:
        warn("the answer was cut: /reset, or go on from it")
    if answer.tool_calls:
        names = ", ".join(call.name for call in answer.tool_calls)
        warn(f"the answer calls {names}, which a chat cannot run: its calls are dropped")
