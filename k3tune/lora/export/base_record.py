"""What an export remembers of its base, to be recognised by: a sample of the published files."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3tune.errors import CheckpointError
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.safetensors_files import ShardReader, StoredTensor, read_header
from k3tune.published.tensor_table import text_tensors

_EDGE_BYTES = 4096


def base_record(metadata: Mapping[str, Any], base: Path | None, name: str | None) -> dict[str, Any]:
    """The ``base`` entry of ``k3tune.json``.

    Args:
        metadata: of the trained adapter; its fingerprint is kept.
        base: folder of the base, if it is at hand.
        name: of the base, as the adapter's config says.
    """
    known = metadata.get("base") or {}
    return {
        "name": known.get("name") or name,
        "dtype": known.get("dtype"),
        "fingerprint": known.get("fingerprint"),
        "sample": known.get("sample") or (sample_digest(base) if base is not None else None),
    }


def sample_digest(base: str | Path) -> str | None:
    """SHA-256 over the edges of the trunk's tensors and of each layer's first and last expert.

    Two published checkpoints that are not the same differ in it, at the cost of some thousand
    short reads, however their tensors are spread over files.

    Returns:
        ``"sample:sha256:"`` and 64 hex digits; None where the weights are not there.
    """
    base = Path(base)
    wanted = _sampled_names(parse_config(read_config(base)))
    found: dict[str, str] = {}
    # one file's header at a time: the whole table of a published K3 has half a million rows
    for file in sorted(base.glob("*.safetensors")):
        try:
            header = read_header(file)
        except CheckpointError:
            return None
        with ShardReader(file) as reader:
            for name in header.keys() & wanted:
                found[name] = _digest(reader, name, header[name])
    if found.keys() != wanted:
        return None
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name} {found[name]}\n".encode())
    return f"sample:sha256:{total.hexdigest()}"


def _sampled_names(architecture: Architecture) -> set[str]:
    one = text_tensors(replace(architecture, num_experts=1))
    last = f".experts.{architecture.num_experts - 1}."
    return {name for zero in one for name in (zero, zero.replace(".experts.0.", last))}


def _digest(reader: ShardReader, name: str, stored: StoredTensor) -> str:
    hasher = hashlib.sha256(f"{stored.dtype} {stored.shape}".encode())
    for edge in _edges(reader, name, stored):
        hasher.update(edge)
    return hasher.hexdigest()


def _edges(reader: ShardReader, name: str, stored: StoredTensor) -> list[bytearray]:
    size = min(_EDGE_BYTES, stored.size_bytes)
    edges = []
    for offset in (stored.offset, stored.offset + stored.size_bytes - size):
        edge = bytearray(size)
        reader.read_into(name, offset, memoryview(edge))
        edges.append(edge)
    return edges
