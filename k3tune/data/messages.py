"""Conversations as callers write them, checked and turned into typed messages.

A message is a dict with ``role`` and ``content``, as chat APIs write it. Keys whose value is None
count as absent, for column formats fill missing keys with null.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from k3tune.data.errors import DataError, Problem

_KEYS = {
    "system": ("role", "content", "name", "tools"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls"),
    "tool": ("role", "content", "name", "tool", "tool_call_id"),
}


@dataclass(frozen=True)
class Spoken:
    """A system or user message; each part of the content is encoded on its own."""

    role: Literal["system", "user"]
    parts: tuple[str, ...]
    name: str | None = None


@dataclass(frozen=True)
class ToolDeclaration:
    """A system message that adds tools in the middle of a conversation."""

    tools: list[Any]


@dataclass(frozen=True)
class ToolCall:
    """One call: arguments, or the text that was meant to be their JSON."""

    name: str
    arguments: dict[str, Any]
    unparsed: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class AssistantTurn:
    """An assistant message; ``position`` counts from 0 in the caller's list."""

    parts: tuple[str, ...]
    reasoning: str
    calls: tuple[ToolCall, ...]
    position: int
    name: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """A result, in the order of the calls; ``index`` counts from 1 within the turn."""

    tool: str
    index: int
    parts: tuple[str, ...]


Message = Spoken | ToolDeclaration | AssistantTurn | ToolResult


def read_conversation(messages: Any, *, answer_follows: bool = False) -> list[Message]:
    """Check a conversation and return it typed, tool results in the order of their calls.

    Order: the first speaker is the user; an assistant turn follows the user or tool results; the
    results of all calls of a turn follow it directly, each once. System messages stand anywhere
    but between calls and results. A conversation may end with unanswered calls.

    Args:
        messages: list of dicts.
        answer_follows: an assistant turn will be appended, so the conversation must allow it.

    Raises:
        DataError: naming the message (from 1), what it holds and what was expected.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"messages is {_kind(messages)}, expected a list with at least one message")
    rows = [_present(message, number) for number, message in enumerate(messages, start=1)]
    _check_order([row["role"] for row in rows], rows, answer_follows)
    typed: list[Message] = []
    position = 0
    while position < len(rows):
        role = rows[position]["role"]
        if role == "tool":
            end = position
            while end < len(rows) and rows[end]["role"] == "tool":
                end += 1
            turn = typed[-1]
            assert isinstance(turn, AssistantTurn), f"{turn=}"
            typed += _results(rows[position:end], turn.calls, position + 1)
            position = end
            continue
        place = _place(position + 1, role)
        typed.append(
            _assistant(rows[position], position, place)
            if role == "assistant"
            else _spoken(rows[position], place)
        )
        position += 1
    return typed


def read_tools(tools: Any, place: str) -> list[Any]:
    """Check a list of tool declarations, each an object with a name.

    Raises:
        DataError: naming ``place`` and the first declaration (from 1) that has no name.
    """
    if not isinstance(tools, list | tuple):
        raise DataError(
            f"{place} is {_kind(tools)}, expected a list of tool declarations",
            Problem.INVALID_TOOL_JSON,
        )
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise DataError(
                f'{place}: tool {number} has no name, expected {{"type": "function", "function": '
                '{"name": ..., "description": ..., "parameters": ...}}',
                Problem.INVALID_TOOL_JSON,
            )
    return list(tools)


def _present(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is {_kind(message)}, expected an object with a role")
    row = {key: value for key, value in message.items() if value is not None}
    role = row.get("role")
    if role not in _KEYS:
        raise DataError(
            f"message {number} has role {role!r}, expected one of {', '.join(_KEYS)}",
        )
    unknown = [key for key in row if key not in _KEYS[role]]
    if unknown:
        raise DataError(
            f"{_place(number, role)} has the unknown key {unknown[0]!r}, expected only "
            f"{', '.join(_KEYS[role])}"
        )
    return row


def _check_order(roles: list[str], rows: list[dict[str, Any]], answer_follows: bool) -> None:
    speaker, waiting = None, 0
    ends = [*roles, "assistant"] if answer_follows else roles
    for number, role in enumerate(ends, start=1):
        place = _place(number, role) if number <= len(roles) else "the generation prompt"
        if role == "tool":
            if speaker not in ("assistant", "tool") or not waiting:
                raise DataError(f"{place} is a tool result without a call", Problem.ROLE_ORDER)
            waiting -= 1
        elif waiting:
            raise DataError(
                f"{place} comes before the results of all tool calls, {waiting} missing: put them "
                "directly after the assistant message that calls",
                Problem.ROLE_ORDER,
            )
        elif role == "assistant" and speaker not in ("user", "tool"):
            before = "an assistant message" if speaker else "any user message"
            where = "follows" if speaker else "comes before"
            raise DataError(
                f"{place} {where} {before}, expected a user message or tool results before it",
                Problem.ROLE_ORDER,
            )
        if role == "assistant" and number <= len(roles):
            calls = rows[number - 1].get("tool_calls") or ()
            waiting = len(calls) if isinstance(calls, Sequence) else 0
        if role != "system":
            speaker = role


def _spoken(row: dict[str, Any], place: str) -> Message:
    if row.get("tools"):
        if row.get("content") or row.get("name"):
            raise DataError(
                f"{place} has tools beside content or a name, expected tools alone: a declaration "
                "is a message of its own"
            )
        return ToolDeclaration(read_tools(row["tools"], f"{place}, tools"))
    return Spoken(row["role"], _content(row, place), _name(row, "name", place))


def _assistant(row: dict[str, Any], position: int, place: str) -> AssistantTurn:
    calls = row.get("tool_calls", ())
    if not isinstance(calls, list | tuple):
        raise DataError(f"{place}: tool_calls is {_kind(calls)}, expected a list")
    typed = tuple(
        _call(call, f"{place}, call {number}") for number, call in enumerate(calls, start=1)
    )
    parts = () if typed and "content" not in row else _content(row, place)
    return AssistantTurn(parts, _reasoning(row, place), typed, position, _name(row, "name", place))


def _reasoning(row: dict[str, Any], place: str) -> str:
    given = [row[key] for key in ("reasoning_content", "reasoning") if key in row]
    for value in given:
        if not isinstance(value, str):
            raise DataError(f"{place}: the reasoning is {_kind(value)}, expected text")
    if len(given) == 2 and given[0] != given[1]:
        raise DataError(f"{place}: reasoning_content and reasoning differ, expected one of them")
    return given[0] if given and given[0].strip() else ""


def _call(call: Any, place: str) -> ToolCall:
    if not isinstance(call, Mapping):
        raise DataError(f"{place} is {_kind(call)}, expected an object")
    outer = {key: value for key, value in call.items() if value is not None}
    flat = "function" not in outer
    function = outer if flat else outer["function"]
    if not isinstance(function, Mapping):
        raise DataError(f"{place}: function is {_kind(function)}, expected an object")
    known = {"id", "type", "name", "arguments"} if flat else {"id", "type", "function"}
    unknown = [key for key in outer if key not in known]
    if not flat:
        unknown += [key for key in function if key not in ("name", "arguments")]
    if unknown:
        raise DataError(f"{place} has the unknown key {unknown[0]!r}")
    if outer.get("type", "function") != "function":
        raise DataError(f"{place} has type {outer['type']!r}, expected 'function'")
    name = _name(dict(function), "name", place)
    if name is None:
        raise DataError(f"{place} has no name, expected the name of a function")
    arguments, unparsed = _arguments(function.get("arguments"), place)
    identity = outer.get("id")
    return ToolCall(name, arguments, unparsed, None if identity is None else str(identity))


def _arguments(arguments: Any, place: str) -> tuple[dict[str, Any], str | None]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}, None
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return {}, arguments
    if not isinstance(value, Mapping):
        raise DataError(
            f"{place}: the arguments are {_kind(value)}, expected a JSON object",
            Problem.INVALID_TOOL_JSON,
        )
    for key in value:
        if not isinstance(key, str):
            raise DataError(
                f"{place}: the argument name {key!r} is no text", Problem.INVALID_TOOL_JSON
            )
    return dict(value), None


def _refuse_constant(text: str) -> Any:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{text} is not JSON")


def _results(
    rows: list[dict[str, Any]], calls: tuple[ToolCall, ...], first: int
) -> list[ToolResult]:
    if len(rows) < len(calls):
        raise DataError(
            f"message {first + len(rows) - 1} (tool) is the last of {len(rows)} results for "
            f"{len(calls)} calls, expected one a call",
            Problem.ROLE_ORDER,
        )
    answered: dict[int, tuple[dict[str, Any], str]] = {}
    with_id = sum("tool_call_id" in row for row in rows)
    if with_id not in (0, len(rows)):
        raise DataError(
            f"message {first} (tool) and those after it: {with_id} of {len(rows)} results have a "
            "tool_call_id, expected all or none"
        )
    ids = [call.id for call in calls]
    for offset, row in enumerate(rows):
        place = _place(first + offset, "tool")
        index = offset
        if with_id:
            identity = str(row["tool_call_id"])
            if ids.count(identity) != 1:
                raise DataError(
                    f"{place} answers the call {identity!r}, expected one of {ids}",
                    Problem.ROLE_ORDER,
                )
            index = ids.index(identity)
        if index in answered:
            raise DataError(
                f"{place} answers the call {ids[index]!r} a second time", Problem.ROLE_ORDER
            )
        answered[index] = (row, place)
    results = []
    for index, (row, place) in sorted(answered.items()):
        for key in ("tool", "name"):
            if _name(row, key, place) not in (None, calls[index].name):
                raise DataError(
                    f"{place} has {key} {row[key]!r}, expected {calls[index].name!r} as in the call"
                )
        results.append(ToolResult(calls[index].name, index + 1, _content(row, place)))
    return results


def _content(row: dict[str, Any], place: str) -> tuple[str, ...]:
    if "content" not in row:
        raise DataError(f"{place} has no content, expected text")
    content = row["content"]
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list | tuple):
        raise DataError(f"{place}: the content is {_kind(content)}, expected text")
    parts = []
    for part in content:
        present = (
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, Mapping)
            else {}
        )
        if set(present) != {"type", "text"} or present["type"] != "text":
            raise DataError(
                f"{place} has a content part {str(part)[:60]!r}, expected "
                '{"type": "text", "text": ...}: k3tune trains on text only'
            )
        if not isinstance(present["text"], str):
            raise DataError(f"{place}: a text part is {_kind(present['text'])}, expected text")
        parts.append(present["text"])
    return tuple(parts)


def _name(row: dict[str, Any], key: str, place: str) -> str | None:
    name = row.get(key)
    if name is not None and (not isinstance(name, str) or not name):
        raise DataError(f"{place}: {key} is {name!r}, expected a text that is not empty")
    return name


def _place(number: int, role: str) -> str:
    return f"message {number} ({role})"


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple | Mapping | str) and not value:
        return f"an empty {type(value).__name__}"
    return "missing" if value is None else f"a {type(value).__name__}"
