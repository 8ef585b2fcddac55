"""Conversations in files: one JSON document, or one a line."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from k3tune.errors import K3TuneError
from k3tune.files import path_text, shown

_EXPECTED = 'a list of messages such as [{"role": "user", "content": "Hi"}], or an object with it'


class Conversation(NamedTuple):
    """Messages and tools as chat APIs write them, and where they stand, for errors."""

    messages: list[Any]
    tools: list[Any] | None
    place: str


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read a file that holds one conversation, or JSONL with one a line.

    A conversation is a list of messages, or an object with ``messages`` and perhaps ``tools``.

    Raises:
        K3TuneError: if the file cannot be read, or naming the first line (from 1) that is neither.
    """
    try:
        content = Path(path).read_bytes()
    # a name with a null byte is a ValueError
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise K3TuneError(f"cannot read {path_text(path)}: {reason}") from error
    try:
        return [_conversation(json.loads(content), str(path))]
    except (ValueError, RecursionError) as error:
        if isinstance(error, K3TuneError):
            raise
    conversations = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            place = f"{path} line {number}"
            conversations.append(_conversation(_json(line, place), place))
    if not conversations:
        raise K3TuneError(f"{path} is empty, expected {_EXPECTED}")
    return conversations


def _json(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise K3TuneError(f"{place} is no JSON ({error}), expected {_EXPECTED}") from error


def _conversation(value: Any, place: str) -> Conversation:
    tools = None
    if isinstance(value, dict):
        unknown = sorted(value.keys() - {"messages", "tools"})
        if "messages" not in value or unknown:
            raise K3TuneError(
                f"{place} is an object with {shown(list(value))}, expected messages and perhaps "
                "tools"
            )
        value, tools = value["messages"], value.get("tools")
    if not isinstance(value, list):
        raise K3TuneError(f"{place} is a JSON {type(value).__name__}, expected {_EXPECTED}")
    return Conversation(value, tools, place)
