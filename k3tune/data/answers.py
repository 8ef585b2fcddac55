"""Generated ids back into what an assistant says: reasoning, content and tool calls.

The control tokens themselves are read, not their names in text, so an answer cannot fake markup
by spelling it. :class:`AnswerReader` takes ids one by one, for streaming; what is not K3's chat
format is skipped and said.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from k3tune.data.chat import CLOSE, CONTROL_TOKENS, END_OF_MESSAGE, OPEN, SEP
from k3tune.data.messages import ToolCall

_TAG = re.compile(r'([^\s"=]+)((?: [^\s"=]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([^\s"=]+)="([^"]*)"')
# what surrogateescape makes of bytes that are no UTF-8
_STRAY_BYTE = re.compile("[\udc80-\udcff]")
_JSON_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class AnswerTokenizer(Protocol):
    """What reading an answer asks of a tokenizer."""

    def control_id(self, token: str) -> int:
        """Id of a special token; KeyError if it is none."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Names of ids."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes that ids stand for."""


class Piece(NamedTuple):
    """Text that was added to one of an answer's channels."""

    channel: Literal["think", "response"]
    text: str


@dataclass(frozen=True)
class Answer:
    """What an assistant said.

    Attributes:
        reasoning: of the think channel.
        content: of the response channel.
        tool_calls: those that are complete; one whose arguments were written as one JSON text,
            which is no form of an answer, has that text in ``unparsed``.
        ended: the last token was ``<|end_of_msg|>``; a cut answer has what came before the cut.
        malformed: what is not K3's chat format, a sentence each; a cut is not among them.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    ended: bool
    malformed: tuple[str, ...]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if call.unparsed is None else call.unparsed,
                    },
                }
                for call in self.tool_calls
            ]
        return message


def read_answer(ids: Sequence[int], tokenizer: AnswerTokenizer, *, thinking: bool = True) -> Answer:
    """Read generated ids, whatever they are.

    Args:
        ids: what was generated after a generation prompt, up to and with the end of the message.
        tokenizer: of the base.
        thinking: the generation prompt opened the think channel, not the response channel.
    """
    reader = AnswerReader(tokenizer, thinking=thinking)
    for token in ids:
        reader.feed(token)
    return reader.answer()


def parse_answer(
    ids: Sequence[int], tokenizer: AnswerTokenizer, *, thinking: bool = True
) -> Answer | None:
    """Read generated ids if they are an answer in exact markup with its end; None otherwise.

    Args:
        ids, tokenizer, thinking: as in :func:`read_answer`.
    """
    answer = read_answer(ids, tokenizer, thinking=thinking)
    return None if answer.malformed or not answer.ended else answer


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str]
    texts: list[str] = field(default_factory=list)
    children: list["_Element"] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        """What stands in it, its children left out."""
        return "".join(self.texts)


class AnswerReader:
    """Reads an answer token by token.

    Args:
        tokenizer: of the base.
        thinking: the generation prompt opened the think channel, not the response channel.
    """

    def __init__(self, tokenizer: AnswerTokenizer, *, thinking: bool = True) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._controls = {tokenizer.control_id(token): token for token in CONTROL_TOKENS}
        self._root = _Element("", {})
        self._open = [self._root]
        self._begin("message", {})
        self._begin("think" if thinking else "response", {})
        self._tag: tuple[str, list[int]] | None = None
        self._decoder = _text_decoder()
        self._ended = False
        self._stopped = False
        # a dict for its order: each sentence is said once
        self._malformed: dict[str, None] = {}

    def feed(self, token: int) -> Piece | None:
        """Take the next id.

        Returns:
            The text that this adds to a channel; None if it is markup, or bytes of a character
            that is not complete.
        """
        if self._stopped:
            self._note("there are tokens after the end")
            return None
        control = self._controls.get(token)
        special = self._special_name(token) if control is None else None
        if control is not None:
            self._control(control)
        elif special is not None:
            self._note(f"the special token {special} is no part of an answer")
        elif self._tag is not None:
            self._tag[1].append(token)
        else:
            return self._text(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        return None

    def answer(self) -> Answer:
        """What was said so far."""
        message = self._root.children[0]
        channels = {
            name: "".join(child.text for child in message.children if child.tag == name)
            for name in ("think", "response")
        }
        notes = list(self._malformed) + self._channel_notes(message)
        calls: list[ToolCall] = []
        for tools in message.children:
            if tools.tag == "tools":
                calls += _read_calls(tools, notes)
        return Answer(
            channels["think"],
            channels["response"],
            tuple(calls),
            self._ended,
            tuple(dict.fromkeys(notes)),
        )

    def _channel_notes(self, message: _Element) -> list[str]:
        expected = ["think", "response", "tools"] if self._thinking else ["response", "tools"]
        tags = [child.tag for child in message.children]
        # a cut answer may stop anywhere; a whole one may do without tools
        complete = not self._ended or len(tags) >= len(expected) - 1
        notes = []
        if tags != expected[: len(tags)] or not complete:
            notes.append(
                f"the channels are {', '.join(tags)}, expected {', '.join(expected[:-1])} and, "
                "with calls, tools"
            )
        for element in (self._root, message, *message.children):
            channel = element.tag in ("think", "response")
            if element.text and not channel:
                notes.append(f"the text {element.text[:40]!r} stands outside the channels")
            if element.attributes:
                notes.append(f"{element.tag} has attributes, expected none")
            if channel and element.children:
                notes.append(f"{element.children[0].tag} stands inside {element.tag}")
        if len(self._root.children) > 1:
            notes.append(f"{self._root.children[1].tag} stands after the message")
        return notes

    def _control(self, control: str) -> None:
        self._text(self._decoder.decode(b"", final=True))
        self._decoder = _text_decoder()
        if control == SEP:
            self._finish_tag()
            return
        if self._tag is not None:
            self._note(f"{control} comes before the <|sep|> of a tag")
            self._tag = None
        if control in (OPEN, CLOSE):
            self._tag = (control, [])
            return
        assert control == END_OF_MESSAGE, f"{control=}"
        if len(self._open) > 1:
            self._note(f"{control} comes before {self._open[-1].tag} is closed")
        self._ended = self._stopped = True

    def _finish_tag(self) -> None:
        if self._tag is None:
            self._note("a <|sep|> stands outside a tag")
            return
        (control, ids), self._tag = self._tag, None
        text = self._tokenizer.decode_bytes(ids).decode("utf-8", "replace")
        if control == CLOSE:
            self._end(text)
            return
        match = _TAG.fullmatch(text)
        if match is None:
            self._note(f'the tag {text[:40]!r} is not of the form name key="value"')
            self._begin(text.split(" ")[0], {})
            return
        pairs = [(key, _unescape(value)) for key, value in _ATTRIBUTE.findall(match[2])]
        if len(dict(pairs)) < len(pairs):
            self._note(f"the tag {text[:40]!r} gives an attribute twice")
        self._begin(match[1], dict(pairs))

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        element = _Element(tag, attributes)
        self._open[-1].children.append(element)
        self._open.append(element)

    def _end(self, tag: str) -> None:
        tags = [element.tag for element in self._open[1:]]
        if tag not in tags:
            self._note(f"{tag[:40]!r} is closed and was not open")
            return
        if tags[-1] != tag:
            self._note(f"{tag} is closed before {tags[-1]}")
        while True:
            element = self._open.pop()
            element.closed = True
            if element.tag == tag:
                return

    def _text(self, text: str) -> Piece | None:
        if not text:
            return None
        text, strays = _STRAY_BYTE.subn("\ufffd", text)
        if strays:
            self._note("there are bytes that are no UTF-8")
        element = self._open[-1]
        element.texts.append(text)
        # root, message, channel
        if len(self._open) == 3 and element.tag in ("think", "response"):
            return Piece("think" if element.tag == "think" else "response", text)
        return None

    def _special_name(self, token: int) -> str | None:
        [name] = self._tokenizer.convert_ids_to_tokens([token])
        try:
            return name if self._tokenizer.control_id(name) == token else None
        except KeyError:
            return None

    def _note(self, sentence: str) -> None:
        self._malformed[sentence] = None


def _text_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("surrogateescape")


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _read_calls(tools: _Element, notes: list[str]) -> list[ToolCall]:
    """The closed calls of a tools element; what is wrong with them goes into ``notes``."""
    calls = []
    if tools.closed and not tools.children:
        notes.append("tools holds no call")
    for number, element in enumerate(tools.children, start=1):
        place = f"call {number}"
        name = element.attributes.get("tool", "")
        if element.tag != "call" or not name or element.text:
            notes.append(f"{place} is {element.tag!r} of the tool {name!r}, expected a named call")
        if element.attributes.get("index") != str(number) or len(element.attributes) != 2:
            notes.append(f'{place} has attributes {element.attributes}, expected index="{number}"')
        if element.closed and element.tag == "call" and name:
            calls.append(_read_call(element, name, place, notes))
    return calls


def _read_call(element: _Element, name: str, place: str, notes: list[str]) -> ToolCall:
    arguments: dict[str, Any] = {}
    unparsed = None
    for child in element.children:
        key = child.attributes.get("key")
        if child.tag == "json":
            # the format has this element for what a caller passes on unparsed, not for answers
            notes.append(f"{place} has its arguments as one JSON text")
            unparsed = child.text
        elif child.tag != "argument" or key is None or child.children:
            notes.append(f"{place} holds {child.tag!r}, expected arguments with a key")
        else:
            if key in arguments:
                notes.append(f"{place} gives the argument {key!r} twice")
            arguments[key] = _read_value(child, f"{place}, argument {key!r}", notes)
    return ToolCall(name, arguments, unparsed)


def _read_value(element: _Element, place: str, notes: list[str]) -> Any:
    """The argument's value; its text as it stands where that is not what its type says."""
    kind = element.attributes.get("type")
    if set(element.attributes) != {"key", "type"}:
        notes.append(f"{place} has attributes {', '.join(element.attributes)}, expected key, type")
    if kind == "string":
        return element.text
    try:
        value = json.loads(element.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        notes.append(f"{place} is no JSON ({error})")
        return element.text
    # a JSON true is an int to Python: the exact type counts
    if type(value) not in _JSON_KINDS.get(kind or "", ()):
        notes.append(f"{place} has type {kind!r} and the value {element.text[:40]!r}")
        return element.text
    return value


def _refuse_constant(text: str) -> Any:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{text} is not JSON")
