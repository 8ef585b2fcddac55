"""Files that commands read and write: checked line by line, written whole or not at all."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from k3tune.errors import K3TuneError


def read_id_rows(path: str | Path) -> list[list[int]]:
    """Read JSONL with one list of token ids a line.

    Returns:
        A list a line, in order; ``[]`` stays ``[]``.

    Raises:
        K3TuneError: if the file cannot be read, or naming the first line (from 1) that is anything
            but a JSON list of integers.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise K3TuneError(f"cannot read {path}: {error.strerror}") from error
    if not lines[-1]:
        lines.pop()
    return [_id_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def parse_ids(text: str, source: str) -> list[int]:
    """Read token ids separated by spaces or commas, with or without brackets around them.

    Raises:
        K3TuneError: naming ``source`` and the first word that is no integer.
    """
    words = re.sub(r"^\s*\[|\]\s*$|,", " ", text).split()
    for word in words:
        if not re.fullmatch(r"-?[0-9]+", word):
            raise K3TuneError(f"{source} holds {word!r}, expected token ids such as 1 2 3")
    return [int(word) for word in words]


def check_ids(rows: list[list[int]], vocab_size: int, source: str) -> None:
    """Refuse ids outside ``0 .. vocab_size - 1``.

    Raises:
        K3TuneError: naming ``source``, the first such row (from 1), the id and its position.
    """
    for number, row in enumerate(rows, start=1):
        for position, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise K3TuneError(
                    f"{source} {number} has id {token} at position {position}, expected ids from "
                    f"0 to {vocab_size - 1}: encode it with the tokenizer of this base"
                )


@contextmanager
def replace_file(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file beside ``path`` that takes its name when the block ends without an error.

    A reader, or a run after a crash, finds the old content or the new, never a part.

    Raises:
        K3TuneError: if the folder is missing or cannot be written, or ``path`` is no regular file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise K3TuneError(f"cannot write {path}: it is no regular file, name a file to (over)write")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = temporary.open("x", encoding="utf-8")
    except OSError as error:
        raise K3TuneError(f"cannot write {path}: {error.strerror}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def _id_row(line: bytes, place: str) -> list[int]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise K3TuneError(
            f"{place} is no JSON ({error}), expected a list of token ids such as [1, 2, 3]"
        ) from error
    if not isinstance(row, list):
        raise K3TuneError(f"{place} is a JSON {type(row).__name__}, expected a list of token ids")
    for item in row:
        # a JSON true is an int to Python
        if type(item) is not int:
            raise K3TuneError(f"{place} holds {item!r}, expected token ids (integers) only")
    return row
