"""What a client must know of an adapter directory before servers are told its path."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from k3tune.errors import RolloutError

_CONFIG = "adapter_config.json"
# a larger one is taken to have changed: reading it again would cost the step too much
_HASHED_BYTES = 1 << 30
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's directory.

    Attributes:
        path: absolute.
        rank: the largest.
        changes_the_base: some B is not zero.
        digest: of the tensors' files, or None for more than a GiB.
    """

    path: Path
    rank: int
    changes_the_base: bool
    digest: str | None


def read_adapter_folder(path: str | Path) -> AdapterFolder:
    """Look at a directory's config and tensors.

    Raises:
        RolloutError: if it is no adapter directory.
    """
    folder = Path(path).absolute()
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise RolloutError(f"{folder} holds no .safetensors file, expected an adapter's")
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        return AdapterFolder(folder, max(ranks), _has_nonzero_B(files), _digest(files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(
            f"{folder} is no adapter directory ({type(error).__name__}: {error}), expected one "
            "that save_adapter or k3tune export wrote"
        ) from error


def _has_nonzero_B(files: list[Path]) -> bool:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                if "lora_B" in key and bool(tensors.get_tensor(key).any()):
                    return True
    return False


def _digest(files: list[Path]) -> str | None:
    if sum(file.stat().st_size for file in files) > _HASHED_BYTES:
        return None
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                total.update(chunk)
    return total.hexdigest()
