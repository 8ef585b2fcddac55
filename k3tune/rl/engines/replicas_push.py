"""Pushed tensors as adapter directories, for servers that read them by path."""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import safe_open
from torch import Tensor

from k3tune.errors import AdapterError, ConfigError, K3TuneError, RolloutError
from k3tune.lora import export_adapter
from k3tune.lora.directory import new_adapter_directory
from k3tune.lora.export.capabilities import ENGINES
from k3tune.lora.export.factors import open_source
from k3tune.lora.export.layout import plan_layout
from k3tune.lora.keys import CONFIG_NAME, METADATA_NAME
from k3tune.lora.read import FactorReader
from k3tune.lora.shards import Entry, Pending, write_json, write_shards

Layout = Literal["k3tune", "vllm", "sglang"]

_SHARD_BYTES = 4 << 30


class PushFolder:
    """Writes each pushed version into a directory of its own below one folder.

    Args:
        root: folder that trainer and servers see under one name; made if it is not there.
        template: an adapter directory with the modules, ranks and alphas of what will be pushed,
            as ``save_adapter`` writes it at the start of a run.
        layout: what the servers read; ``k3tune serve`` reads ``k3tune``.
        dtype: of the factors. Servers round to bfloat16 anyway; float32 keeps them as trained.

    Raises:
        ConfigError: for another layout, a template that is no adapter directory, or modules that
            the layout has no place for.
    """

    def __init__(
        self,
        root: str | Path,
        template: str | Path,
        *,
        layout: Layout = "k3tune",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if layout not in get_args(Layout):
            raise ConfigError(
                f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}"
            )
        self._root, self._layout, self._dtype = Path(root).absolute(), layout, dtype
        try:
            self._config = json.loads((Path(template) / CONFIG_NAME).read_bytes())
            self._metadata = json.loads((Path(template) / METADATA_NAME).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{template} is no adapter directory ({error}), expected one that save_adapter "
                "wrote"
            ) from error
        self._shapes = _shapes(Path(template))
        if layout != "k3tune":
            _check_layout(Path(template), layout)
        # a run that is resumed must not meet the directories of the one before
        self._run = secrets.token_hex(4)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write a version; the directory appears whole.

        Args:
            version: of the adapter.
            tensors: as :func:`k3tune.lora.adapter_state` gives them, whole.

        Raises:
            RolloutError: if these are not the template's tensors, they cannot be written, or the
                servers' layout has no place for them.
        """
        shapes = {key: list(value.shape) for key, value in tensors.items()}
        if shapes != self._shapes:
            wrong = sorted(
                key for key in shapes | self._shapes if shapes.get(key) != self._shapes.get(key)
            )
            raise RolloutError(
                f"{len(wrong)} of {len(self._shapes)} tensors to push are not those of the "
                f"template (first {wrong[0]}: {shapes.get(wrong[0])}, expected "
                f"{self._shapes.get(wrong[0])}): does this process hold a part of the experts only?"
            )
        folder = self._root / f"{self._run}-v{version}-{secrets.token_hex(2)}"
        try:
            with new_adapter_directory(folder, overwrite=False) as temporary:
                write_json(temporary / CONFIG_NAME, self._config)
                write_json(temporary / METADATA_NAME, {**self._metadata, "version": version})
                pending = [_pending(key, value, self._dtype) for key, value in tensors.items()]
                write_shards(temporary, pending, _SHARD_BYTES)
            if self._layout == "k3tune":
                return folder
            exported = folder.with_name(f"{folder.name}-{self._layout}")
            export_adapter(folder, exported, format=self._layout, progress=False)
            shutil.rmtree(folder)
            return exported
        except (K3TuneError, OSError) as error:
            raise RolloutError(
                f"version {version} cannot be written for servers: {error}"
            ) from error

    def remove(self, folder: Path) -> None:
        """Delete a directory that :meth:`write` made; others are left alone."""
        if folder.parent == self._root and folder.name.startswith(f"{self._run}-v"):
            shutil.rmtree(folder, ignore_errors=True)


def _check_layout(template: Path, layout: str) -> None:
    """Whether servers take what will be pushed, said before a step was sampled and trained."""
    try:
        with FactorReader() as reader:
            adapter = open_source(template, None, reader)
            plan_layout(adapter, ENGINES[layout], form=None, drop=(), dtype=None)
    except AdapterError as error:
        raise ConfigError(
            f"what is trained cannot be pushed to {layout}: {error}; in a run, choose lora_targets "
            "and lora_form that it takes"
        ) from error


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
    return shapes


def _pending(key: str, tensor: Tensor, dtype: torch.dtype) -> Pending:
    def parts() -> Iterator[Tensor]:
        value = tensor.detach().to(dtype).cpu()
        if not torch.isfinite(value).all():
            raise RolloutError(f"{key} holds values that are not finite as {dtype}")
        yield value

    return Pending([Entry(key, dtype, tuple(tensor.shape))], parts)
