"""Kimi K3's chat format: messages become segments, and every segment is encoded on its own.

An element is ``<|open|>tag key="value"<|sep|>body<|close|>tag<|sep|>``, a message is an element
followed by ``<|end_of_msg|>``. The four control tokens are the only segments looked up by name;
everything else, above all what callers write, is encoded as ordinary text, so no text can produce
a control token. Joining segments before encoding would let the pieces of neighbours merge.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from k3tune.data.errors import DataError, Problem
from k3tune.data.messages import (
    AssistantTurn,
    Message,
    Spoken,
    ToolCall,
    ToolDeclaration,
    ToolResult,
    read_conversation,
    read_tools,
)
from k3tune.errors import ConfigError

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
CONTROL_TOKENS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)
THINKING_EFFORTS = ("low", "high", "max")
NO_TARGET = -100

# What the model was trained to read, word for word. The sentence on efforts names medium, which
# the format does not have.
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


class ChatTokenizer(Protocol):
    """What rendering asks of a tokenizer."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""

    def control_id(self, token: str) -> int:
        """Id of one of ``CONTROL_TOKENS``."""


@dataclass(frozen=True)
class Segment:
    """A piece of the rendered chat that is encoded alone; ``trained`` if it bears loss."""

    text: str
    control: bool
    trained: bool


@dataclass(frozen=True)
class RenderedChat:
    """A chat as segments, and as token ids with 1 in ``assistant_mask`` where a token is trained.

    ``num_unparsed_calls`` counts tool calls whose arguments are no JSON: they are rendered as
    they are, without loss.
    """

    segments: tuple[Segment, ...]
    input_ids: list[int]
    assistant_mask: list[int]
    num_unparsed_calls: int = 0

    @cached_property
    def text(self) -> str:
        """The segments joined. Encoding it again may give other ids."""
        return "".join(segment.text for segment in self.segments)

    @property
    def labels(self) -> list[int]:
        """``input_ids`` with -100 where a token is not trained."""
        return [
            token if trained else NO_TARGET
            for token, trained in zip(self.input_ids, self.assistant_mask, strict=True)
        ]


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    train_opening_tag: bool = True,
    train_from: int = 0,
) -> RenderedChat:
    """Render a conversation in K3's chat format.

    The order is: tools, thinking effort, messages, tool choice, response format, generation prompt.
    Loss falls on what an assistant message holds after its header, up to and with its
    ``<|end_of_msg|>``, and on nothing else.

    Args:
        messages: dicts, see :mod:`k3tune.data.messages`.
        tokenizer: encodes the segments.
        tools: declarations in JSON schema; keys are sorted.
        thinking: render every assistant message with a think channel, empty where it has no
            reasoning; False renders none at all. One conversation has one mode.
        thinking_effort: ``low``, ``high`` or ``max`` as a system message; None leaves it out.
            Without thinking it is left out too.
        tool_choice: ``required`` or ``none`` as a system message; ``auto`` or None without.
        response_format: ``json_object``, or an object with type ``json_object`` or
            ``json_schema``; ``text`` or None without.
        add_generation_prompt: end with the opening of an assistant message and its first channel.
        train_opening_tag: put loss on the opening tag of an assistant message's first channel,
            which a generation prompt already contains.
        train_from: index in ``messages`` of the first message that may bear loss.

    Raises:
        DataError: if the conversation or a tool is not valid.
        ConfigError: if an option is not.
    """
    check_thinking_effort(thinking_effort)
    typed = read_conversation(messages, answer_follows=add_generation_prompt)
    chat = _Writer()
    if tools:
        _declare(chat, _TOOLS, read_tools(tools, "tools"))
    if thinking and thinking_effort is not None:
        _system(chat, "thinking-effort", _EFFORT.format(thinking_effort))
    for message in typed:
        if isinstance(message, AssistantTurn):
            trained = message.position >= train_from
            _assistant(chat, message, thinking, trained, trained and train_opening_tag)
        else:
            _other(chat, message)
    _requests(chat, tool_choice, response_format)
    if add_generation_prompt:
        chat.open("message", role="assistant")
        chat.open("think" if thinking else "response")
    return _encode(chat, tokenizer)


def check_thinking_effort(effort: str | None) -> None:
    """Refuse an effort that the chat format does not have.

    Raises:
        ConfigError: naming it.
    """
    if effort is not None and effort not in THINKING_EFFORTS:
        raise ConfigError(
            f"thinking_effort is {effort!r}, expected {', '.join(THINKING_EFFORTS)} or None: K3's "
            "chat format knows no other, though its own text names medium"
        )


class _Writer:
    """Collects segments; what is written while ``trained`` is True bears loss."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.trained = False
        self.num_unparsed_calls = 0

    def control(self, token: str) -> None:
        """Write a control token."""
        self.segments.append(Segment(token, True, self.trained))

    def text(self, text: str) -> None:
        """Write ordinary text, in which no control token is read."""
        if text:
            self.segments.append(Segment(text, False, self.trained))

    def open(self, tag: str, **attributes: str | int | None) -> None:
        """Write an opening tag; attributes that are None are left out."""
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            if value is not None:
                self.text(f" {key}")
                self.text('="')
                self.text(str(value).replace("&", "&amp;").replace('"', "&quot;"))
                self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        """Write a closing tag."""
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def element(self, tag: str, parts: Sequence[str], **attributes: str | int | None) -> None:
        """Write a tag, its parts as segments of their own, and its end."""
        self.open(tag, **attributes)
        for part in parts:
            self.text(part)
        self.close(tag)


def _system(chat: _Writer, kind: str, body: str) -> None:
    chat.element("message", [body], role="system", type=kind)
    chat.control(END_OF_MESSAGE)


def _declare(chat: _Writer, introduction: str, tools: list[Any]) -> None:
    _system(chat, "tool-declare", introduction + _fenced(tools, "tools"))


def _requests(
    chat: _Writer, tool_choice: str | None, response_format: str | Mapping[str, Any] | None
) -> None:
    """What the caller asks of the next message only."""
    if tool_choice not in (None, "auto", *_TOOL_CHOICE):
        raise ConfigError(f"tool_choice is {tool_choice!r}, expected auto, required or none")
    if tool_choice in _TOOL_CHOICE:
        told = f"The system is invoked with `tool_choice={tool_choice}`.\n"
        _system(chat, "tool-choice", told + _TOOL_CHOICE[tool_choice])
    wanted = _response_format(response_format)
    if wanted is not None:
        _system(chat, "response-format", wanted)


def _other(chat: _Writer, message: Message) -> None:
    match message:
        case Spoken(role, parts, name):
            chat.element("message", parts, role=role, name=name)
        case ToolDeclaration(tools):
            _declare(chat, _MORE_TOOLS, tools)
            return
        case ToolResult(tool, index, parts):
            chat.element("message", parts, role="tool", tool=tool, index=index)
    chat.control(END_OF_MESSAGE)


def _assistant(
    chat: _Writer, turn: AssistantTurn, thinking: bool, trained: bool, opening_trained: bool
) -> None:
    if turn.reasoning and not thinking:
        raise DataError(
            f"message {turn.position + 1} (assistant) has reasoning, but the conversation is "
            "rendered without thinking: drop its reasoning or render it with thinking"
        )
    chat.open("message", role="assistant", name=turn.name)
    channels: list[tuple[str, Sequence[str]]] = [("response", turn.parts)]
    if thinking:
        channels.insert(0, ("think", [turn.reasoning]))
    for number, (channel, parts) in enumerate(channels):
        chat.trained = opening_trained if number == 0 else trained
        chat.open(channel)
        chat.trained = trained
        for part in parts:
            chat.text(part)
        chat.close(channel)
    if turn.calls:
        chat.open("tools")
        for index, call in enumerate(turn.calls, start=1):
            place = f"message {turn.position + 1} (assistant), call {index}"
            _call(chat, call, index, place, trained)
        chat.close("tools")
    chat.close("message")
    chat.control(END_OF_MESSAGE)
    chat.trained = False


def _call(chat: _Writer, call: ToolCall, index: int, place: str, trained: bool) -> None:
    chat.open("call", tool=call.name, index=index)
    for key, value in call.arguments.items():
        body = value if isinstance(value, str) else _json(value, place)
        chat.element("argument", [body], key=key, type=_type_name(value))
    if call.unparsed is not None:
        # the model reads this form and is never taught to write it
        chat.trained = False
        chat.element("json", [call.unparsed], type="object")
        chat.trained = trained
        chat.num_unparsed_calls += 1
    chat.close("call")


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    # a bool is an int to Python
    for kind, name in (
        (bool, "boolean"),
        (int | float, "number"),
        (str, "string"),
        (Mapping, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "array"


def _json(value: Any, place: str, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place} cannot be written as JSON: {error}", Problem.INVALID_TOOL_JSON
        ) from error


def _fenced(value: Any, place: str) -> str:
    body = _json(value, place, separators=(",", ":"), sort_keys=True)
    return f"```json\n{body}\n```"


def _response_format(wanted: str | Mapping[str, Any] | None) -> str | None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind in (None, "text"):
        return None
    told = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_object":
        return told
    inner = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise ConfigError(
            f'response_format is {wanted!r}, expected "text", "json_object" or '
            '{"type": "json_schema", "json_schema": {"schema": {...}}}'
        )
    return told + _SCHEMA + _fenced(schema, "response_format")


def _encode(chat: _Writer, tokenizer: ChatTokenizer) -> RenderedChat:
    input_ids: list[int] = []
    mask: list[int] = []
    for segment in chat.segments:
        if segment.control:
            input_ids.append(tokenizer.control_id(segment.text))
        else:
            input_ids += tokenizer.encode_text(segment.text)
        mask += [int(segment.trained)] * (len(input_ids) - len(mask))
    return RenderedChat(tuple(chat.segments), input_ids, mask, chat.num_unparsed_calls)
