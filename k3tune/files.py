"""Files that commands read and write: checked line by line, written whole or not at all."""

import codecs
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from k3tune.errors import K3TuneError

# What a file is called until it is whole. Whoever writes one holds a lock on it, so that those of
# killed processes can be told apart and removed, wherever on a shared disk they ran.
_TEMPORARY_PREFIX, _TEMPORARY_SUFFIX = ".k3tune-", ".tmp"
# Between the making of such a file and its lock.
_UNLOCKED_S = 10.0
_SHOWN = 100
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_PATH = 1000
# No vocabulary needs more, and Python refuses to read thousands of digits.
_MOST_DIGITS = 18


def read_id_rows(path: str | Path) -> list[list[int]]:
    """Read JSONL with one list of token ids a line; a byte-order mark is skipped.

    Returns:
        A list a line, in order; ``[]`` stays ``[]``.

    Raises:
        K3TuneError: if the file cannot be read, or naming the first line (from 1) that is anything
            but a JSON list of integers.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise K3TuneError(_cannot("read", path, error)) from error
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_id_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def parse_ids(text: str, source: str) -> list[int]:
    """Read token ids separated by spaces or single commas, with or without brackets around them.

    Raises:
        K3TuneError: naming ``source`` and the first word that is no integer, a bracket without its
            other half, or a comma without an id on either side.
    """
    inside = text.strip()
    if inside[:1] == "[" or inside[-1:] == "]":
        if not (inside[:1] == "[" and inside[-1:] == "]" and len(inside) > 1):
            raise K3TuneError(
                f"{source} holds {shown(text)}, expected both brackets or none, such as [1, 2, 3]"
            )
        inside = inside[1:-1]
    parts = [part.split() for part in inside.split(",")]
    if len(parts) > 1 and not all(parts):
        raise K3TuneError(
            f"{source} holds {shown(text)}, expected a token id on both sides of each comma: "
            "leave the other commas out"
        )
    words = [word for part in parts for word in part]
    for word in words:
        if not re.fullmatch(rf"-?[0-9]{{1,{_MOST_DIGITS}}}", word):
            raise K3TuneError(f"{source} holds {shown(word)}, expected token ids such as 1 2 3")
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


def shown(value: object) -> str:
    """``value`` as Python writes it, cut to a length that fits into a sentence."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def path_text(path: str | Path) -> str:
    """A path for a sentence: characters that cannot be printed escaped, and cut if it is absurd."""
    name = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
    return name if len(name) <= _LONGEST_PATH else f"{name[:_SHOWN]}..."


def refuse_same_file(input_file: str | Path, output_file: str | Path) -> None:
    """Refuse an output that would take the place of the input.

    Raises:
        K3TuneError: if both names lead to one file.
    """
    try:
        same = os.path.samefile(input_file, output_file)
    except (OSError, ValueError):
        # one is not there, or no name at all: reading and writing say so
        return
    if same:
        raise K3TuneError(
            f"cannot write {output_file}: it is the input {input_file}, expected another file: "
            "give the output a name of its own"
        )


@contextmanager
def replace_file(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file beside ``path`` that takes its name when the block ends without an error.

    A reader, or a run after a crash, finds the old content or the new, never a part. What killed
    processes left unfinished in the folder is removed.

    Raises:
        K3TuneError: if the folder is missing or cannot be written, or ``path`` is no regular file.
    """
    with _sentences(path):
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise K3TuneError(
                f"cannot write {target}: it is no regular file, name a file to (over)write"
            )
        _remove_stale(target.parent)
        file = _open_temporary(target.parent)
    temporary = Path(file.name)
    try:
        with file:
            yield file
            with _sentences(path):
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(target)
                _sync_folder(target.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise K3TuneError(_cannot("write", path, error)) from error
        raise


def _open_temporary(folder: Path) -> IO[str]:
    token = secrets.token_hex(8)
    file = (folder / f"{_TEMPORARY_PREFIX}{token}{_TEMPORARY_SUFFIX}").open("x", encoding="utf-8")
    # without locks the file is not removed after a kill, and nothing else changes
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove_stale(folder: Path) -> None:
    """Remove temporary files whose writers are gone: their locks went with them."""
    for stale in folder.glob(f"{_TEMPORARY_PREFIX}*{_TEMPORARY_SUFFIX}"):
        # locked by its writer, or removed by another process at this moment
        with suppress(OSError), stale.open("r+b") as file:
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
            # a file of this moment may be about to be locked
            if age_s > _UNLOCKED_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a new name last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # some network filesystems know no sync of folders
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _sentences(path: str | Path) -> Iterator[None]:
    """Say in one sentence what the system refuses about ``path``."""
    try:
        yield
    except K3TuneError:
        raise
    # a loop of links is a RuntimeError to pathlib
    except (OSError, RuntimeError, ValueError) as error:
        raise K3TuneError(_cannot("write", path, error)) from error


def _cannot(do: str, path: str | Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    advice = "check its name, its folder and your permissions"
    if isinstance(error, OSError) and error.errno in _FULL:
        advice = "make room there"
    return f"cannot {do} {path_text(path)}: {reason}: {advice}"


def _id_row(line: bytes, place: str) -> list[int]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise K3TuneError(
            f"{place} is no JSON ({error}), expected a list of token ids such as [1, 2, 3]"
        ) from error
    if not isinstance(row, list):
        raise K3TuneError(
            f"{place} is a JSON {type(row).__name__}, expected a list of token ids, such as "
            "[1, 2, 3]"
        )
    for item in row:
        # a JSON true is an int to Python
        if type(item) is not int:
            raise K3TuneError(f"{place} holds {shown(item)}, expected token ids (integers) only")
    return row
