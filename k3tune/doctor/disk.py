"""Room and speed of the disk that holds, or will hold, the checkpoint."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from k3tune.doctor.finding import Finding
from k3tune.errors import K3TuneError

# Kimi K3's published files, image tower included.
K3_BYTES = 1_560_000_000_000
_BLOCK = 8 << 20
_ALIGNMENT = 4096
# A node that reads for longer than this at every start is worth a better disk.
_LONG_LOAD_S = 1800.0
# Another process may free or fill the page cache meanwhile: above this it was not the disk.
_MEMORY_BYTES_PER_S = 30e9


class Speed(NamedTuple):
    """What was measured: bytes a second, and over how many bytes."""

    bytes_per_s: float
    measured_bytes: int


def disk_findings(folder: Path, is_checkpoint: bool, budget_s: float) -> Iterator[Finding]:
    """Free space and read speed.

    Args:
        folder: a checkpoint, or the folder to put one into.
        is_checkpoint: which of the two it is.
        budget_s: seconds to measure for, about.

    Raises:
        K3TuneError: if the folder is not there or, as a checkpoint, holds no weights.
    """
    shards = sorted(folder.glob("*.safetensors")) if is_checkpoint else []
    if not folder.is_dir():
        raise K3TuneError(f"{folder} is no folder, expected a checkpoint's: check its name")
    if is_checkpoint and not shards:
        raise K3TuneError(f"{folder} holds no *.safetensors, expected a checkpoint's folder")
    size = sum(shard.stat().st_size for shard in shards) or K3_BYTES
    name = "the checkpoint" if shards else "Kimi K3's checkpoint"
    yield _space(folder, size, bool(shards))
    largest = max(shards, key=lambda shard: shard.stat().st_size, default=None)
    try:
        speed = _read(largest, budget_s) if largest else _write_and_read(folder, budget_s)
    except OSError as error:
        yield Finding(
            "disk speed",
            "warning",
            f"not measured: {error.strerror} in {folder}",
            "run it in a folder you may write to, or name the checkpoint with --base",
        )
        return
    yield _judge(speed, size, name)


def _space(folder: Path, size: int, is_there: bool) -> Finding:
    free = shutil.disk_usage(folder).free
    facts = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": size}
    has = f"{_size(free)} free in {folder.resolve()}"
    if is_there:
        return Finding("disk", "ok", f"the checkpoint's {_size(size)} are here, {has}", None, facts)
    if free < size:
        return Finding(
            "disk",
            "warning",
            f"{has}, Kimi K3's checkpoint takes {_size(size)}",
            "k3-nano needs none of it; for K3 use a disk that holds it and name it with --base",
            facts,
        )
    return Finding("disk", "ok", f"{has}, enough for Kimi K3's {_size(size)}", None, facts)


def _judge(speed: Speed, size: int, name: str) -> Finding:
    load_s = size / speed.bytes_per_s
    facts = {
        "read_bytes_per_s": round(speed.bytes_per_s),
        "measured_bytes": speed.measured_bytes,
        "load_s": round(load_s, 1),
    }
    if speed.bytes_per_s > _MEMORY_BYTES_PER_S:
        text = f"reads came from memory at {_size(speed.bytes_per_s)}/s: the disk was not measured"
        return Finding("disk speed", "ok", text, None, facts)
    text = f"reads {_size(speed.bytes_per_s)}/s: {name} ({_size(size)}) in {_duration(load_s)}"
    if load_s > _LONG_LOAD_S:
        return Finding(
            "disk speed",
            "warning",
            text,
            "for K3 use local NVMe, or a parallel file system: every start reads it all",
            facts,
        )
    return Finding("disk speed", "ok", text, None, facts)


def _read(file: Path, budget_s: float) -> Speed:
    """Read a file from its start, past the page cache as far as the system allows."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return _timed_reads(descriptor, os.fstat(descriptor).st_size, budget_s)
    finally:
        os.close(descriptor)


def _write_and_read(folder: Path, budget_s: float) -> Speed:
    """Write a file that nobody sees for a third of the time, and read it back."""
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        begun, written = time.perf_counter(), 0
        while time.perf_counter() - begun < budget_s / 3:
            written += os.write(file.fileno(), block)
            os.fdatasync(file.fileno())
        return _timed_reads(file.fileno(), written, budget_s / 3)


def _timed_reads(descriptor: int, size: int, budget_s: float) -> Speed:
    # clean pages of this file leave the cache, or else memory would be measured
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = memoryview(bytearray(_BLOCK))
    begun, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - begun < budget_s:
        got = os.preadv(descriptor, [buffer], done)
        if got == 0:
            break
        done += got
    return Speed(done / max(time.perf_counter() - begun, 1e-9), done)


def _size(count: float) -> str:
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count / 1000:.3g} kB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
