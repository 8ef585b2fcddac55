"""From what a user names, a folder or a hub id, to a folder. Nothing is imported until needed."""

import re
from pathlib import Path

from k3tune.errors import CheckpointError
from k3tune.published.safetensors_files import unreadable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(path: str | Path, *, weights: bool = True) -> Path:
    """Return a local folder for ``path``.

    Args:
        path: a folder, or a hub id such as ``moonshotai/Kimi-K3``, whose files are then downloaded
            into the hub's cache. An existing folder wins over a hub id; a ``Path`` is never an id.
        weights: also download the safetensors files, not config and index alone.

    Raises:
        CheckpointError: if ``path`` is a file or no usable name, or the download fails (no network,
            offline mode, no such repository, no access).
    """
    folder = Path(path)
    try:
        is_file, is_folder = folder.is_file(), folder.is_dir()
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    if is_file:
        raise CheckpointError(
            f"{folder}: expected a checkpoint folder, found a file: pass the folder that holds "
            "config.json and the safetensors files (k3tune loads no pickle and no lone file)"
        )
    if is_folder or not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"] if weights else ["*.json"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    # whatever stops the hub client: its transport's errors come through with classes of their own
    except Exception as error:
        said = str(error).strip().splitlines()[:1]
        raise CheckpointError(
            f"{path}: expected a folder or a hub repository, found no such folder here, and the "
            f"download failed ({': '.join([type(error).__name__, *said])}): "
            "pass a local folder, or go online once so that the files are in the hub's cache"
        ) from error
