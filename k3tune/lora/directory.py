"""A directory that appears under its name whole, or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3tune.errors import AdapterError
from k3tune.lora.keys import CONFIG_NAME


@contextmanager
def new_adapter_directory(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill beside ``path``, which takes its name when the block ends without an error.

    Args:
        path: where the adapter will be.
        overwrite: replace an adapter that is there.

    Raises:
        AdapterError: if something is there that may not be replaced, or writing fails.
    """
    path = Path(path)
    _check_target(path, overwrite)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        _publish(temporary, path)
    except OSError as error:
        raise AdapterError(f"cannot write {path}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        raise AdapterError(
            f"{path} exists: name another directory, or replace the adapter there (overwrite=True, "
            "--overwrite)"
        )
    if not (path / CONFIG_NAME).is_file():
        raise AdapterError(
            f"{path} exists and is no adapter (it has no {CONFIG_NAME}): name another directory"
        )


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished directory its name; one that is there steps aside first."""
    old = None
    if path.exists():
        old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        if old is not None:
            old.rename(path)
        raise
    _sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
