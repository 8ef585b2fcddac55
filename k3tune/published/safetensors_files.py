"""Safetensors files read by hand: a checked header, and tensors at their positions.

Standard library only. Nothing is mapped into memory: a mapping of a terabyte stays resident and
counts against the process that only wanted to copy from it once.
"""

import json
import math
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from k3tune.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format's own bound; the whole published K3 in a single file would need three quarters of it.
_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 16
_LENGTH_BYTES = 8
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


def read_json(text: bytes, file: Path) -> dict[str, Any]:
    """Parse a JSON object in which no key may stand twice.

    Raises:
        CheckpointError: naming ``file``, if ``text`` is anything else.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected a JSON object, found text that does not parse ({error}): {_AGAIN}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, found a {type(value).__name__}: {_AGAIN}"
        )
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} stands twice")
    return table


def pickle_message(file: Path) -> str:
    """Why a pickle is refused."""
    return (
        f"{file}: expected safetensors, found a pickle: loading one runs its code, so k3tune "
        "refuses it; use the safetensors files as published"
    )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check a file's header; the tensors must fill the file exactly.

    Raises:
        CheckpointError: if the file cannot be read, is a pickle, is truncated, or its header
            describes something else than a gapless row of tensors.
    """
    try:
        with open(file, "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = _header_length(file, stream.read(_LENGTH_BYTES + 1), file_bytes)
            stream.seek(_LENGTH_BYTES)
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    header = read_json(text, file)
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    tensors = {name: _entry(file, name, entry, start) for name, entry in header.items()}
    _check_layout(file, tensors, start, file_bytes)
    return tensors


def _header_length(file: Path, head: bytes, file_bytes: int) -> int:
    if len(head) <= _LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: expected a safetensors file, found {file_bytes} bytes, too short for a "
            f"header (truncated): {_AGAIN}"
        )
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    # a header of 640 bytes starts like a pickle, so the brace behind the length decides
    if head[_LENGTH_BYTES:] == b"{" and length <= min(
        _MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES
    ):
        return length
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointError(pickle_message(file))
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
        f"{file}: expected a safetensors header that opens with '{{', found "
        f"{head[_LENGTH_BYTES:]!r}: {_AGAIN}"
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(
            f"{file}: tensor {name}: expected a dtype of {', '.join(_DTYPE_BITS)}, found {dtype!r}"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise CheckpointError(
            f"{file}: tensor {name}: expected a shape of at most {_MAX_RANK} sizes, found "
            f"{str(shape)[:100]}"
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_size, offsets))
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(
            f"{file}: tensor {name}: expected data_offsets [begin, end], found {str(offsets)[:100]}"
        )
    begin, end = offsets
    size = tensor_bytes(dtype, tuple(shape))
    if end - begin != size:
        raise CheckpointError(
            f"{file}: tensor {name}: expected {size} bytes for {dtype} {shape}, found data_offsets "
            f"{offsets} of {end - begin} bytes"
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
                f"found {tensor.offset - start}: tensors overlap or leave a gap"
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
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error

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
                    f"{self.file}: tensor {name}: cannot be read ({error.strerror})"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.file}: tensor {name}: expected {len(buffer)} bytes from {offset} on, "
                    f"found {done} (truncated while it was read): {_AGAIN}"
                )
            done += count
