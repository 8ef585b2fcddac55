"""Checkpoint folders of a run: complete or not there, read and written without pickle.

``checkpoint-<step>`` holds ``adapter/`` (a PEFT directory, FP32), ``optimizer-*.safetensors`` with
``optimizer.json`` (state by parameter name, whatever the number of processes), ``scheduler.json``,
``ranks.json`` (random generators of each process), ``run.json`` (data position, counters, config),
``trainer_state.json`` (the Trainer's own) and, last, ``complete.json``: sizes and SHA-256 of all
the others. A folder is filled under a hidden name, synced and then renamed.
"""

import hashlib
import json
import logging
import os
import random
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from k3tune.errors import CheckpointError

logger = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.checkpoint-\d+\.[0-9a-f]{8}(\.old)?")
_SUFFIXES = (".safetensors", ".json")
_CHUNK_BYTES = 16 << 20


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, f"{folder=}"
    return int(match[1])


@contextmanager
def new_checkpoint(output_dir: str | Path, step: int) -> Iterator[Path]:
    """A folder to fill, which becomes the step's checkpoint when the block ends without an error.

    A reader, or a run after a crash, finds the whole checkpoint or none. One that is there under
    the name already is replaced.

    Raises:
        CheckpointError: if it cannot be written, as on a full disk, or holds anything but
            safetensors and JSON files.
    """
    target = checkpoint_path(output_dir, step)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _seal(temporary)
        _publish(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}: make room there, or name another output_dir; "
            "the checkpoints before it are kept"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint; a damaged one is skipped with a warning that says why."""
    for step in sorted(_steps(output_dir), reverse=True):
        folder = checkpoint_path(output_dir, step)
        try:
            check_checkpoint(folder)
        except CheckpointError as error:
            logger.warning("skipped a damaged checkpoint: %s", error)
        else:
            return folder
    return None


def check_checkpoint(folder: str | Path) -> None:
    """Compare a checkpoint's files with its marker: names, sizes and hashes.

    Raises:
        CheckpointError: naming the first file that is missing, added or other than it was.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no checkpoint folder")
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder} has no {MARKER}: it was never finished")
    marker = read_json(folder / MARKER)
    if marker.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{folder / MARKER} has schema {marker.get('schema')!r}, expected {SCHEMA}: resume "
            "with the k3tune that wrote it"
        )
    expected: Mapping[str, Mapping[str, Any]] = marker["files"]
    found = {str(file.relative_to(folder)): file for file in _files(folder)}
    for name in sorted(expected.keys() ^ found.keys()):
        word = "is missing" if name in expected else "does not belong there"
        raise CheckpointError(f"{folder / name} {word}")
    for name, entry in expected.items():
        size = found[name].stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} has {size} bytes, expected {entry['bytes']}: it was cut short or "
                "changed"
            )
    for name, entry in expected.items():
        if _sha256(found[name]) != entry["sha256"]:
            raise CheckpointError(f"{folder / name} does not have the SHA-256 it was written with")


def remove_old_checkpoints(
    output_dir: str | Path, limit: int | None, keep: str | Path | None = None
) -> None:
    """Keep the newest ``limit`` checkpoints, at least one, and ``keep``; None keeps all."""
    if limit is None:
        return
    spared = None if keep is None else Path(keep).resolve()
    for step in sorted(_steps(output_dir))[: -max(limit, 1)]:
        folder = checkpoint_path(output_dir, step)
        if folder.resolve() != spared:
            # out of sight first: a run killed here leaves no half of a checkpoint
            hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
            folder.rename(hidden)
            shutil.rmtree(hidden)


def remove_leftovers(output_dir: str | Path) -> None:
    """Delete what a killed run left half written or half deleted."""
    folder = Path(output_dir)
    if folder.is_dir():
        for entry in folder.iterdir():
            if _HIDDEN.fullmatch(entry.name):
                shutil.rmtree(entry)


def write_json(file: Path, content: Any) -> None:
    """Write JSON.

    Raises:
        CheckpointError: naming the file, if JSON cannot hold the content.
    """
    try:
        text = json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file.name}: {error}; checkpoints hold JSON and safetensors only"
        ) from error
    file.write_text(text + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: if the file is missing or holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}, expected an object")
    return content


def random_state() -> dict[str, Any]:
    """State of this process's generators (Python, NumPy, torch on CPU and GPU), for JSON."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _hex(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set this process's generators to a state of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _steps(output_dir: str | Path) -> list[int]:
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    matches = [_FOLDER.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return [int(match[1]) for match in matches if match]


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MARKER)


def _seal(folder: Path) -> None:
    entries = {}
    for file in _files(folder):
        name = str(file.relative_to(folder))
        if file.suffix not in _SUFFIXES:
            raise CheckpointError(
                f"checkpoint file {name}: expected safetensors and JSON files only"
            )
        _sync(file)
        entries[name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    write_json(folder / MARKER, {"schema": SCHEMA, "files": entries})
    _sync(folder / MARKER)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _publish(temporary: Path, target: Path) -> None:
    old = None
    if target.exists():
        old = target.with_name(f"{temporary.name}.old")
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    hasher = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
