"""Safetensors files written one tensor at a time: header first, then each tensor's bytes."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from k3tune.lora.keys import INDEX_NAME, SINGLE_NAME
from k3tune.published.safetensors_files import tensor_bytes

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8


class Pending(NamedTuple):
    """A tensor to write: ``read`` returns it, on the CPU, when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return tensor_bytes(DTYPE_NAMES[self.dtype], self.shape)


def write_shards(folder: Path, tensors: Sequence[Pending], shard_bytes: int) -> list[str]:
    """Write tensors to one file, or to several with an index where they exceed ``shard_bytes``.

    Args:
        folder: where the files go; every file is synced to disk.
        tensors: in the order they are written.
        shard_bytes: most bytes of tensors a file; a larger tensor gets a file of its own.

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
        weight_map |= dict.fromkeys((pending.key for pending in shard), name)
    total = sum(pending.size_bytes for pending in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)
    return [*names, INDEX_NAME]


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
    for pending in tensors:
        end = offset + pending.size_bytes
        header[pending.key] = {
            "dtype": DTYPE_NAMES[pending.dtype],
            "shape": list(pending.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for pending in tensors:
            tensor = pending.read()
            assert (tensor.dtype, tuple(tensor.shape)) == (pending.dtype, pending.shape), (
                f"{pending.key=} {tensor.dtype=} {tensor.shape=}"
            )
            stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        _sync(stream)


def _sync(stream: IO[bytes] | IO[str]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
