"""Safetensors files written part by part: header first, then each tensor's bytes."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from k3tune.lora.keys import INDEX_NAME, SINGLE_NAME

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8
# half a million small factors are written by large calls
_BUFFER_BYTES = 1 << 20
# So many bytes are on their way to the disk while the next ones are read and hashed.
_WRITEBACK_BYTES = 16 << 20


class Entry(NamedTuple):
    """A tensor of a file: its name and kind."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Pending:
    """Tensors to write, one behind the other; ``parts`` reads them, when their turn comes.

    The parts are runs of values in the order of the file, on the CPU, of any shape; one may end in
    the middle of a tensor. ``recycle`` takes back a part that nobody reads any more.
    """

    entries: Sequence[Entry]
    parts: Callable[[], Iterator[Tensor]]
    recycle: Callable[[Tensor], None] | None = None

    @cached_property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return sum(entry.size_bytes for entry in self.entries)


def write_shards(folder: Path, tensors: Sequence[Pending], shard_bytes: int) -> list[str]:
    """Write tensors to one file, or to several with an index where they exceed ``shard_bytes``.

    Args:
        folder: where the files go; every file is synced to disk.
        tensors: in the order they are written.
        shard_bytes: most bytes of tensors a file; a larger one gets a file of its own.

    Returns:
        Names of the files written.
    """
    shards = list(_split(tensors, shard_bytes))
    if len(shards) == 1:
        _write_file(folder / SINGLE_NAME, shards[0])
        return [SINGLE_NAME]
    stem = SINGLE_NAME.removesuffix(".safetensors")
    names = [
        f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard)
        weight_map |= {entry.key: name for pending in shard for entry in pending.entries}
    total = sum(pending.size_bytes for pending in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)
    return [*names, INDEX_NAME]


def tensor_buffer(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, not copied where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def write_json(file: Path, content: object) -> None:
    """Write JSON and sync it to disk."""
    with file.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.write("\n")
        _sync(stream)


def _split(tensors: Sequence[Pending], shard_bytes: int) -> Iterator[list[Pending]]:
    shard: list[Pending] = []
    size = 0
    for pending in tensors:
        if shard and size + pending.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(pending)
        size += pending.size_bytes
    yield shard


def _write_file(file: Path, tensors: Sequence[Pending]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in (entry for pending in tensors for entry in pending.entries):
        end = offset + entry.size_bytes
        header[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb", buffering=_BUFFER_BYTES) as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        begun = 0
        for pending in tensors:
            written = 0
            for part in pending.parts():
                written += stream.write(tensor_buffer(part))
                if stream.tell() - begun >= _WRITEBACK_BYTES:
                    begun = _begin_writeback(stream, begun)
            assert written == pending.size_bytes, f"{pending.entries[0]=} {written=}"
        _sync(stream)


def _begin_writeback(stream: IO[bytes], start: int) -> int:
    """Let the system write what lies behind ``start`` to disk, without waiting; returns its end."""
    stream.flush()
    end = stream.tell()
    # Linux begins to write dirty pages at this advice; elsewhere nothing is lost
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def _sync(stream: IO[bytes] | IO[str]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
