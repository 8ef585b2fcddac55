"""Kimi K3's tokenizer as transformers and TRL take it.

Two files make it: ``tiktoken.model``, the mergeable byte pieces by rank, and
``tokenizer_config.json``, which names special tokens and their ids. Ids from the number of pieces
up to the highest named one are reserved; those without a name are ``<|reserved_token_{id}|>``.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiktoken import Encoding
from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer
from transformers.utils import get_json_schema

from k3tune.data.chat import CONTROL_TOKENS, END_OF_MESSAGE, RenderedChat, render_chat
from k3tune.errors import CheckpointError, ConfigError
from k3tune.files import replace_file

RANKS_FILE = "tiktoken.model"
_CONFIG_FILE = "tokenizer_config.json"
_NAMED = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}

_CHAT_OPTIONS = (
    "thinking",
    "thinking_effort",
    "tool_choice",
    "response_format",
    "train_opening_tag",
)

_OF_TEMPLATES = ("chat_template", "continue_final_message", "documents", "tokenizer_kwargs")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# tiktoken's dialect: && intersects two sets of characters
_PIECES = "|".join(
    (
        r"\p{Han}+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PORTION = 400_000
_LONGEST_RUN = 25_000
_RUN = re.compile(rf"\s{{1,{_LONGEST_RUN}}}|\S{{1,{_LONGEST_RUN}}}")
_VISIBLE = {byte: 256 + byte for byte in (*range(33), *range(127, 161))}
# what surrogateescape makes of bytes that are no UTF-8
_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")


class K3Tokenizer(PreTrainedTokenizer):
    """Bytes to ids and back, and chats through :func:`k3tune.data.render_chat`.

    Text is encoded with nothing special in it: the characters of a control token give ordinary
    tokens, unless ``split_special_tokens=False`` is passed. No BOS is added.

    ``eos_token`` is ``<|end_of_msg|>``, which ends an answer and which trainers stop on; the
    token that the config calls ``eos_token`` ends a text that is no chat, and is here
    ``end_of_text_token``.
    """

    vocab_files_names = {"vocab_file": RANKS_FILE}  # noqa: RUF012  the base class's form
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str | None = None,
        *,
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
        eos_token: str | AddedToken | None = None,
        model_specific_special_tokens: Mapping[str, str | AddedToken] | None = None,
        split_special_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        """Called by ``from_pretrained`` with the contents of the config.

        Raises:
            CheckpointError: if the files do not make a tokenizer of K3.
        """
        named = dict(added_tokens_decoder or {})
        pieces = _read_pieces(vocab_file)
        specials = _special_ids(len(pieces), named)
        specific = dict(model_specific_special_tokens or {})
        specific.setdefault("end_of_text_token", eos_token or END_OF_MESSAGE)
        _check_named(specials, {**kwargs, **specific})
        self._pieces = pieces
        self._specials = specials
        self._token_of_id = [_printable(piece) for piece in pieces] + list(specials)
        self._id_of_token = {token: index for index, token in enumerate(self._token_of_id)}
        if len(self._id_of_token) != len(self._token_of_id):
            raise CheckpointError("a special token's name is also a mergeable piece")
        self._encoding = Encoding(
            "k3",
            pat_str=_PIECES,
            mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
            special_tokens=specials,
        )
        super().__init__(
            added_tokens_decoder=named,
            eos_token=END_OF_MESSAGE,
            model_specific_special_tokens=specific,
            split_special_tokens=split_special_tokens,
            **kwargs,
        )
        self._extra_special_tokens = [
            token
            for token in named.values()
            if token.special and str(token) not in self.special_tokens_map.values()
        ]

    @property
    def vocab_size(self) -> int:
        """Number of ids, reserved ones included."""
        return len(self._token_of_id)

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a generation: the end of a message, and the end of a text."""
        return list(dict.fromkeys((self.eos_token_id, self.end_of_text_token_id)))

    @property
    def end_of_text_token_id(self) -> int:
        """Id that ends a text which is no chat."""
        return self._id_of_token[str(self._special_tokens_map["end_of_text_token"])]

    def get_vocab(self) -> dict[str, int]:
        """Token -> id; the bytes of a piece are written as one printable character each."""
        return {**self._id_of_token, **self._added_tokens_encoder}

    def control_id(self, token: str) -> int:
        """Id of a special token.

        Raises:
            KeyError: if it is none.
        """
        return self._specials[token]

    def encode_text(self, text: str) -> list[int]:
        """Ids of text in which nothing is special.

        Lone surrogates, which are no text, count as U+FFFD. Long texts are cut every 400,000
        characters and runs without a change between space and other at 25,000, as K3 does.
        """
        return [
            token
            for portion in _portions(text)
            for token in self._encoding.encode_ordinary(portion)
        ]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes; those that are no UTF-8 get a token each."""
        ids: list[int] = []
        for part in _STRAY_BYTES.split(data.decode("utf-8", "surrogateescape")):
            if _STRAY_BYTES.match(part):
                stray = part.encode("utf-8", "surrogateescape")
                ids += [self._encoding.encode_single_token(bytes([byte])) for byte in stray]
            else:
                ids += self.encode_text(part)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for, special tokens as their names.

        Raises:
            ConfigError: naming the first id outside the vocabulary.
        """
        return b"".join(map(self._bytes, self.convert_ids_to_tokens(list(ids))))

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        **options: Any,
    ) -> Any:
        """Render one conversation or a list of them, as transformers' method of this name does.

        Args:
            conversation: messages, or a list of lists of messages.
            tools: declarations, or functions with type hints and a Google docstring.
            options: those of :func:`k3tune.data.render_chat`.

        Returns:
            Text (``tokenize=False``), ids (``return_dict=False``), or a ``BatchEncoding`` with
            ``input_ids``, ``attention_mask`` and, if asked for, ``assistant_masks``.

        Raises:
            ConfigError: if an option is not one of K3's chat format.
            DataError: if a conversation is not valid.
        """
        if return_assistant_tokens_mask and not (tokenize and return_dict):
            raise ConfigError("return_assistant_tokens_mask needs tokenize and return_dict")
        batched = bool(conversation) and isinstance(conversation[0], list | tuple)
        options = {
            **_known(options),
            "tools": _declarations(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        conversations = conversation if batched else [conversation]
        chats = [render_chat(messages, self, **options) for messages in conversations]
        if not tokenize:
            texts = [chat.text for chat in chats]
            return texts if batched else texts[0]
        encoded = self._collate(chats, padding, truncation, max_length)
        if not return_assistant_tokens_mask:
            del encoded["assistant_masks"]
        flat = not batched and return_tensors is None
        result = BatchEncoding(
            {key: rows[0] if flat else rows for key, rows in encoded.items()},
            tensor_type=return_tensors,
        )
        return result if return_dict else result["input_ids"]

    def _collate(
        self,
        chats: list[RenderedChat],
        padding: bool | str,
        truncation: bool,
        max_length: int | None,
    ) -> dict[str, list[list[int]]]:
        """Cut and pad rows and their masks alike, on this tokenizer's sides."""
        padding_strategy, truncate, max_length, _ = self._get_padding_truncation_strategies(
            padding=padding, truncation=truncation, max_length=max_length, verbose=False
        )
        rows = [chat.input_ids for chat in chats]
        masks = [chat.assistant_mask for chat in chats]
        if truncate.value != "do_not_truncate":
            kept = slice(-max_length, None) if self.truncation_side == "left" else slice(max_length)
            rows, masks = [row[kept] for row in rows], [mask[kept] for mask in masks]
        padded = self.pad({"input_ids": rows}, padding=padding_strategy, max_length=max_length)
        fills = [
            [0] * (len(row) - len(mask))
            for row, mask in zip(padded["input_ids"], masks, strict=True)
        ]
        left = self.padding_side == "left"
        masks = [
            fill + mask if left else mask + fill for fill, mask in zip(fills, masks, strict=True)
        ]
        return {**padded, "assistant_masks": masks}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._token_of_id[token] for token in self.encode_text(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        index = self._id_of_token.get(token)
        if index is None and self.unk_token is not None:
            return self._id_of_token[self.unk_token]
        return index

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self._token_of_id):
            raise ConfigError(
                f"the id {index} is outside the vocabulary, expected ids from 0 to "
                f"{len(self._token_of_id) - 1}"
            )
        return self._token_of_id[index]

    def _bytes(self, token: str) -> bytes:
        index = self._id_of_token.get(token)
        if index is None or index >= len(self._pieces):
            return token.encode("utf-8")
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens; bytes that are no UTF-8 become U+FFFD (see :meth:`decode_bytes`)."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Write the pieces as they were read."""
        name = f"{filename_prefix}-{RANKS_FILE}" if filename_prefix else RANKS_FILE
        path = Path(save_directory) / name
        _write_pieces(path, self._pieces)
        return (str(path),)


def write_tokenizer(
    folder: str | Path, pieces: Sequence[bytes], special_tokens: Sequence[str]
) -> None:
    """Write the files of a small tokenizer of this form, for :class:`K3Tokenizer` to read.

    Ids are the 256 bytes, the pieces and the special tokens, in this order. A piece need not be
    reachable by merging shorter ones: a pre-tokenised word that equals a piece becomes that piece.

    Args:
        folder: existing folder, gets ``tiktoken.model`` and ``tokenizer_config.json``.
        pieces: at least two bytes each, no two equal.
        special_tokens: with the four control tokens of the chat format, ``[EOS]`` and ``[PAD]``.

    Raises:
        ConfigError: naming a special token that is missing, or a piece that would never be used.
    """
    missing = [t for t in (*CONTROL_TOKENS, "[EOS]", "[PAD]") if t not in special_tokens]
    if missing:
        raise ConfigError(f"special_tokens lacks {missing[0]!r}, which the chat format needs")
    all_pieces = [bytes([byte]) for byte in range(256)] + list(pieces)
    first = len(all_pieces)
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {
            str(first + offset): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                # transformers drops special tokens when it decodes for people, and these three
                # are what an answer is parsed by
                "special": token not in CONTROL_TOKENS[:3],
            }
            for offset, token in enumerate(special_tokens)
        },
        **{role: token for role, token in _NAMED.items() if token in special_tokens},
    }
    _write_pieces(Path(folder) / RANKS_FILE, all_pieces)
    with replace_file(Path(folder) / _CONFIG_FILE) as file:
        file.write(json.dumps(config, indent=2) + "\n")
    tokenizer = K3Tokenizer.from_pretrained(folder)
    for index, piece in enumerate(pieces, start=256):
        if tokenizer.encode_bytes(piece) != [index]:
            raise ConfigError(f"the piece {piece!r} is never used: it is no pre-tokenised word")


def _read_pieces(vocab_file: str | None) -> list[bytes]:
    """The mergeable pieces in the order of their ranks."""
    if vocab_file is None:
        raise CheckpointError(f"no {RANKS_FILE} found, expected it beside {_CONFIG_FILE}")
    try:
        lines = Path(vocab_file).read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"cannot read {vocab_file}: {error.strerror}") from error
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        try:
            piece, rank = line.split()
            ranks[int(rank)] = base64.b64decode(piece, validate=True)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{vocab_file} line {number} is no base64 piece and rank: {line[:60]!r}"
            ) from error
    if sorted(ranks) != list(range(len(lines))):
        raise CheckpointError(f"{vocab_file} does not give each rank from 0 on once")
    pieces = [ranks[rank] for rank in range(len(ranks))]
    distinct = set(pieces)
    lacking = [byte for byte in range(256) if bytes([byte]) not in distinct]
    if lacking or len(distinct) != len(pieces):
        raise CheckpointError(
            f"{vocab_file} lacks {len(lacking)} of the 256 bytes or holds a piece twice, expected "
            "every byte once, so that any text can be encoded"
        )
    return pieces


def _write_pieces(path: Path, pieces: Sequence[bytes]) -> None:
    with replace_file(path) as file:
        for rank, piece in enumerate(pieces):
            file.write(f"{base64.b64encode(piece).decode('ascii')} {rank}\n")


def _special_ids(first: int, named: Mapping[int, AddedToken]) -> dict[str, int]:
    """Name -> id of every id from ``first`` to the highest named one, in the order of ids."""
    if not named or min(named) < first:
        found = f"the id {min(named)}" if named else "none"
        raise CheckpointError(
            f"added_tokens_decoder of {_CONFIG_FILE} names {found}, expected special tokens with "
            f"ids from {first}, the number of pieces in {RANKS_FILE}"
        )
    ids = range(first, max(named) + 1)
    specials = {
        named[token].content if token in named else f"<|reserved_token_{token}|>": token
        for token in ids
    }
    absent = [token for token in CONTROL_TOKENS if token not in specials]
    if absent or len(specials) != len(ids):
        found = f"lacks {absent[0]!r}" if absent else "gives a name twice"
        raise CheckpointError(
            f"added_tokens_decoder of {_CONFIG_FILE} {found}, expected K3's special tokens"
        )
    return specials


def _check_named(specials: Mapping[str, int], given: Mapping[str, Any]) -> None:
    tokens = [(role, given.get(role)) for role in (*_NAMED, "end_of_text_token")]
    tokens += [("an extra special token", t) for t in given.get("extra_special_tokens") or ()]
    for role, token in tokens:
        if token is not None and str(token) not in specials:
            raise CheckpointError(
                f"{_CONFIG_FILE} names {role} {str(token)!r}, but its added_tokens_decoder gives "
                "it no id: take both from one checkpoint"
            )


def _printable(piece: bytes) -> str:
    """One printable character a byte: its own where it has one, others from U+0100 on."""
    return piece.decode("latin-1").translate(_VISIBLE)


def _portions(text: str) -> Iterator[str]:
    if len(text) <= _LONGEST_RUN:
        yield text
        return
    for start in range(0, len(text), _PORTION):
        portion = text[start : start + _PORTION]
        begin = end = 0
        for run in _RUN.finditer(portion):
            end = run.end()
            # only a run cut short by the pattern's bound is followed by its own kind
            cut = end < len(portion) and portion[end].isspace() == portion[end - 1].isspace()
            if cut:
                yield portion[begin:end]
                begin = end
        yield portion[begin:]


def _declarations(tools: Sequence[Any] | None) -> list[Any] | None:
    if tools is None:
        return None
    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the chat format; trainers also pass those of templates, with no value."""
    options = {
        name: options[name] for name in options if name not in _OF_TEMPLATES or options[name]
    }
    unknown = [name for name in options if name not in _CHAT_OPTIONS]
    if unknown:
        raise ConfigError(
            f"K3's chat format, which is no template, has no option {unknown[0]!r}, expected "
            f"{', '.join(_CHAT_OPTIONS)}"
        )
    return options
