"""Safetensors files read by hand: a checked header, and tensors at their positions.

Standard library only. Nothing is mapped into memory: a mapping of a terabyte stays resident and
counts against the process that only wanted to copy from it once.
"""

import json
import math
import os
import pickletools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from k3tune.errors import CheckpointError, K3TuneError
from k3tune.files import path_text, shown

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format's own bound; the whole published K3 in a single file would need three quarters of it.
_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 16
_LENGTH_BYTES = 8
# Enough to tell a pickle by its first operations.
_HEAD_BYTES = 64
_LONGEST_NAME = 1000
_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
_AGAIN = "download the file again"
# Escapes of characters beyond 16 bits are pairs of these; one alone is no character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class StoredTensor(NamedTuple):
    """Where a tensor lies: ``offset`` is counted from the start of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; ``dtype`` as safetensors spells it."""
    return math.prod(shape) * _DTYPE_BITS[dtype] // 8


def read_json(
    text: bytes, file: Path, error: type[K3TuneError] = CheckpointError
) -> dict[str, Any]:
    """Parse a JSON object in which no key may stand twice; a byte-order mark is skipped.

    Raises:
        K3TuneError: of class ``error`` and naming ``file``, if ``text`` is anything else.
    """
    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded, object_pairs_hook=_unique_keys)
        if _SURROGATE.search(decoded):
            # half a character could neither be printed nor name a file
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as reason:
        raise error(
            f"{file}: expected a JSON object, found text that does not parse ({reason}): {_AGAIN}"
        ) from reason
    if not isinstance(value, dict):
        raise error(f"{file}: expected a JSON object, found a {type(value).__name__}: {_AGAIN}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(twice)} stands twice")
    return table


def check_names(names: Iterable[str], file: Path) -> None:
    """Refuse names of tensors that would break up the sentences they are quoted in.

    Raises:
        CheckpointError: with the first name that is endless or holds control characters.
    """
    for name in names:
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise CheckpointError(
                f"{file}: expected printable names of at most {_LONGEST_NAME} characters, found "
                f"tensor {shown(name)}: {_AGAIN}"
            )


def pickle_message(file: Path, found: str = "a pickle") -> str:
    """Why a pickle is refused."""
    return (
        f"{file}: expected safetensors, found {found}: loading one runs its code, so k3tune "
        "refuses it; use the safetensors files as published"
    )


def unreadable(path: str | Path, error: OSError | ValueError) -> str:
    """What the system said of a path: no access, too long a name, no name at all."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path_text(path)}: cannot be read ({reason}): check its name and permissions"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check a file's header; the tensors must fill the file exactly.

    Raises:
        CheckpointError: if the file cannot be read, is a pickle, is truncated, or its header
            describes something else than a gapless row of tensors.
    """
    try:
        with open(file, "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = _header_length(file, stream.read(_HEAD_BYTES), file_bytes)
            stream.seek(_LENGTH_BYTES)
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(unreadable(file, error)) from error
    header = read_json(text, file)
    header.pop("__metadata__", None)
    check_names(header, file)
    start = _LENGTH_BYTES + length
    tensors = {name: _entry(file, name, entry, start) for name, entry in header.items()}
    _check_layout(file, tensors, start, file_bytes)
    return tensors


def _header_length(file: Path, head: bytes, file_bytes: int) -> int:
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    brace = head[_LENGTH_BYTES : _LENGTH_BYTES + 1]
    # a header of 640 bytes starts like a pickle, so the brace behind the length decides
    if brace == b"{" and length <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        return length
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointError(pickle_message(file))
    if _looks_like_an_old_pickle(head):
        raise CheckpointError(pickle_message(file, "what looks like a pickle"))
    if not brace:
        raise CheckpointError(
            f"{file}: expected a safetensors file, found {file_bytes} bytes, too short for a "
            f"header (truncated): {_AGAIN}"
        )
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: expected a safetensors header of at most {_MAX_HEADER_BYTES} bytes, found "
            f"a length field of {length}: {_AGAIN}"
        )
    if length > file_bytes - _LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: expected a header of {length} bytes, found a file of {file_bytes} bytes "
            f"(truncated): {_AGAIN}"
        )
    raise CheckpointError(
        f"{file}: expected a safetensors header that opens with '{{', found {brace!r}: {_AGAIN}"
    )


def _looks_like_an_old_pickle(head: bytes) -> bool:
    """Whether ``head`` is pickle of protocol 0 or 1, which has no mark: several sound operations.

    It is taken apart, never run.
    """
    operations = 0
    try:
        for operation, _, _ in pickletools.genops(head):
            if operation.name == "STOP":
                return operations > 0
            operations += 1
    except ValueError:
        # text is cut off somewhere, or no pickle; zeros and most other bytes are no operation
        pass
    return operations >= 3


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(
            f"{file}: tensor {name}: expected a dtype of {', '.join(_DTYPE_BITS)}, found "
            f"{shown(dtype)}: {_AGAIN}"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise CheckpointError(
            f"{file}: tensor {name}: expected a shape of at most {_MAX_RANK} sizes, found "
            f"{shown(shape)}: {_AGAIN}"
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_size, offsets))
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(
            f"{file}: tensor {name}: expected data_offsets [begin, end], found {shown(offsets)}: "
            f"{_AGAIN}"
        )
    begin, end = offsets
    size = tensor_bytes(dtype, tuple(shape))
    if end - begin != size:
        raise CheckpointError(
            f"{file}: tensor {name}: expected {size} bytes for {dtype} {shape}, found data_offsets "
            f"{offsets} of {end - begin} bytes: {_AGAIN}"
        )
    return StoredTensor(file, dtype, tuple(shape), start + begin, size)


def _check_layout(
    file: Path, tensors: dict[str, StoredTensor], start: int, file_bytes: int
) -> None:
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if tensor.offset != position:
            raise CheckpointError(
                f"{file}: tensor {name}: expected to begin at byte {position - start} of the data, "
                f"found {tensor.offset - start} (tensors overlap or leave a gap): {_AGAIN}"
            )
        position += tensor.size_bytes
        if position > file_bytes:
            raise CheckpointError(
                f"{file}: tensor {name}: expected data up to byte {position}, found a file of "
                f"{file_bytes} bytes (truncated): {_AGAIN}"
            )
    if position != file_bytes:
        raise CheckpointError(
            f"{file}: expected {position} bytes as its header says, found {file_bytes}: {_AGAIN}"
        )


class ShardReader:
    """An open safetensors file, read at given positions; a context manager."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(unreadable(file, error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (flat, of bytes) from ``offset`` on; ``name`` is for the message.

        Raises:
            CheckpointError: if the file ends first or cannot be read.
        """
        done = 0
        # one call reads at most 2 GiB, and a network filesystem may return less than asked
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.file}: tensor {name}: cannot be read ({error.strerror}): check the disk"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.file}: tensor {name}: expected {len(buffer)} bytes from {offset} on, "
                    f"found {done} (truncated while it was read): {_AGAIN}"
                )
            done += count
