"""Read an adapter directory: its config, and where each factor lies in its files."""

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3tune.errors import AdapterError
from k3tune.lora.keys import CONFIG_NAME, INDEX_NAME, METADATA_NAME, SINGLE_NAME
from k3tune.lora.shards import DTYPE_NAMES
from k3tune.published.safetensors_files import (
    ShardReader,
    StoredTensor,
    pickle_message,
    read_header,
    read_json,
)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Integers of a dtype's width, and its infinities as such: signed for +, unsigned for -.
_BITS = {
    torch.bfloat16: (torch.int16, torch.uint16, 0x7F80, 0xFF80),
    torch.float16: (torch.int16, torch.uint16, 0x7C00, 0xFC00),
    torch.float32: (torch.int32, torch.uint32, 0x7F800000, 0xFF800000),
    torch.float64: (torch.int64, torch.uint64, 0x7FF << 52, 0xFFF << 52),
}
# what is read, checked, hashed and written at one time stays in a cache
_CHUNK_BYTES = 512 << 10
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
# Fields that change the mathematics, with the values that do not.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
}


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of ``adapter_config.json`` that a load uses; ranks are checked, not trusted."""

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    lora_dropout: float
    targets: Sequence[str] | str | None
    layers: Sequence[int] | None


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter directory: config, tensors by key, and k3tune's own metadata if it has any."""

    folder: Path
    config: AdapterConfig
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any] | None


def read_adapter(path: str | Path, *, banks: bool = False) -> AdapterFiles:
    """Read config and headers; no tensor is read.

    Args:
        path: adapter directory.
        banks: allow PEFT's ``target_parameters``, for an import.

    Raises:
        AdapterError: if the directory, its config or a field of it is not usable.
        CheckpointError: if a safetensors or JSON file is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterError(
            f"{folder} is no directory, expected an adapter: {CONFIG_NAME} and {SINGLE_NAME}"
        )
    config_file, metadata_file = folder / CONFIG_NAME, folder / METADATA_NAME
    if not config_file.is_file():
        raise AdapterError(
            f"{folder} has no {CONFIG_NAME}: the scale is alpha / r, and alpha stands there"
        )
    fields = read_json(config_file.read_bytes(), config_file)
    if banks:
        fields.pop("target_parameters", None)
    config = _config(fields, config_file)
    metadata = None
    if metadata_file.is_file():
        metadata = read_json(metadata_file.read_bytes(), metadata_file)
    return AdapterFiles(folder, config, _tensors(folder), metadata)


class FactorReader:
    """Reads factors from a directory's files on the CPU; a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, ShardReader] = {}
        # rows of one stack: its key, the first row held, the rows
        self._ahead: tuple[str, int, Tensor] = ("", 0, torch.empty(0))
        self._last = ("", -1)
        # given back by whoever is done with a chunk
        self._spare: deque[torch.UntypedStorage] = deque()

    def __enter__(self) -> "FactorReader":
        return self

    def __exit__(self, *error: Any) -> None:
        for reader in self._open.values():
            reader.__exit__(None, None, None)

    def read(self, key: str, stored: StoredTensor, rows: Sequence[int] | None = None) -> Tensor:
        """A tensor, or the given rows of it, as fp32.

        Raises:
            AdapterError: if a value is not finite.
            CheckpointError: if the file ends first.
        """
        if rows is None or list(rows) == list(range(stored.shape[0])):
            return self.read_stored(key, stored).float()
        return torch.stack([self.read_stored(key, stored, row).float() for row in rows])

    def read_stored(self, key: str, stored: StoredTensor, row: int | None = None) -> Tensor:
        """A tensor, or one row of it, in the dtype of the file.

        Raises:
            AdapterError: if a value is not finite.
            CheckpointError: if the file ends first.
        """
        if row is None:
            return self._run(key, stored, stored.offset, stored.shape)
        key_ahead, first, rows = self._ahead
        if key_ahead == key and first <= row < first + len(rows):
            self._last = key, row
            return rows[row - first]
        row_bytes = stored.size_bytes // stored.shape[0]
        count = 1
        if row == 0 or self._last == (key, row - 1):
            # read in order: the next ones come with it
            count = max(1, min(_CHUNK_BYTES // max(row_bytes, 1), stored.shape[0] - row))
        self._last = key, row
        offset = stored.offset + row * row_bytes
        read = self._run(key, stored, offset, (count, *stored.shape[1:]))
        self._ahead = key, row, read
        return read[0]

    def chunks(self, key: str, stored: StoredTensor, *, check: bool = True) -> Iterator[Tensor]:
        """A tensor's values in the dtype of the file, some at a time, flat.

        A chunk that is given to :meth:`recycle` holds a later one of any tensor, so that long
        reading stays in memory that a cache holds.

        Raises:
            AdapterError: if a value is not finite and ``check`` is true.
            CheckpointError: if the file ends first.
        """
        total = math.prod(stored.shape)
        width = stored_dtype(stored).itemsize
        step = _CHUNK_BYTES // width
        for start in range(0, total, step):
            count = min(step, total - start)
            tensor = torch.empty(0, dtype=stored_dtype(stored))
            tensor.set_(self._storage(), 0, (count,), (1,))
            self._read_into(tensor, key, stored, stored.offset + start * width, check)
            yield tensor

    def recycle(self, chunk: Tensor) -> None:
        """Take back a chunk that nobody reads any more; any thread may."""
        self._spare.append(chunk.untyped_storage())

    def _storage(self) -> torch.UntypedStorage:
        return self._spare.popleft() if self._spare else torch.UntypedStorage(_CHUNK_BYTES)

    def _run(self, key: str, stored: StoredTensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=stored_dtype(stored))
        self._read_into(tensor, key, stored, offset)
        return tensor

    def _read_into(
        self, tensor: Tensor, key: str, stored: StoredTensor, offset: int, check: bool = True
    ) -> None:
        if stored.file not in self._open:
            self._open[stored.file] = ShardReader(stored.file)
        self._open[stored.file].read_into(
            key, offset, tensor.flatten().view(torch.uint8).numpy().data
        )
        if check and not all_finite(tensor):
            raise AdapterError(
                f"{stored.file}: tensor {key}: expected finite values, found "
                f"{int((~torch.isfinite(tensor)).sum())} that are not: the adapter's training "
                "diverged, or the file is damaged"
            )


def stored_dtype(stored: StoredTensor) -> torch.dtype:
    """The torch dtype of a stored factor."""
    return _DTYPES[stored.dtype]


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is inf or nan, from two maxima over the bits: ten times isfinite's speed.

    Exponent bits all set make the largest integers of either sign: as signed integers the positive
    ones are on top, as unsigned ones the negative.
    """
    if tensor.numel() == 0:
        return True
    signed, unsigned, infinity, minus_infinity = _BITS[tensor.dtype]
    return bool(
        tensor.view(signed).numpy().max() < infinity
        and tensor.view(unsigned).numpy().max() < minus_infinity
    )


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    index_file, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index_file.is_file():
        index = read_json(index_file.read_bytes(), index_file).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(n, str) for n in index.values()):
            raise AdapterError(f"{index_file}: expected a weight_map of key to file name")
        return _indexed(folder, index, index_file)
    if single.is_file():
        return _factors_only(read_header(single))
    for name in _PICKLES:
        if (folder / name).exists():
            raise AdapterError(pickle_message(folder / name))
    raise AdapterError(
        f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found "
        f"{', '.join(sorted(file.name for file in folder.iterdir())) or 'nothing'}"
    )


def _indexed(folder: Path, index: Mapping[str, str], index_file: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(index.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise AdapterError(f"{index_file}: names the file {name!r}, which is not there")
        header = _factors_only(read_header(folder / name))
        for key in header.keys() | {key for key, file in index.items() if file == name}:
            if (key in header) != (index.get(key) == name):
                raise AdapterError(
                    f"{index_file}: expected {key} in {index.get(key, 'no file')}, found it "
                    f"{'in' if key in header else 'missing from'} {name}: files of two adapters?"
                )
        tensors |= header
    return tensors


def _factors_only(header: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    for key, stored in header.items():
        if stored.dtype not in _DTYPES:
            raise AdapterError(
                f"{stored.file}: tensor {key}: expected a dtype of {', '.join(_DTYPES)}, found "
                f"{stored.dtype}"
            )
    return header


def _config(fields: dict[str, Any], file: Path) -> AdapterConfig:
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            f"{file}: peft_type is {fields.get('peft_type')!r}, expected 'LORA': k3tune reads LoRA "
            "adapters only"
        )
    for name, plain in _UNSUPPORTED.items():
        if name in fields and fields[name] not in plain:
            raise AdapterError(
                f"{file}: {name} is {fields[name]!r}, expected {plain[0]!r}: K3's layers compute "
                "plain LoRA only"
            )
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    return AdapterConfig(
        r=_number(fields.get("r"), "r", file, int),
        lora_alpha=_number(fields.get("lora_alpha"), "lora_alpha", file),
        rank_pattern=_pattern(fields.get("rank_pattern"), "rank_pattern", file, int),
        alpha_pattern=_pattern(fields.get("alpha_pattern"), "alpha_pattern", file),
        use_rslora=bool(fields.get("use_rslora", False)),
        lora_dropout=float(fields.get("lora_dropout") or 0.0),
        targets=targets,
        layers=[layers] if isinstance(layers, int) else layers,
    )


def _number(value: Any, name: str, file: Path, *types: type) -> Any:
    if type(value) not in (types or (int, float)) or not value > 0:
        raise AdapterError(f"{file}: {name} is {value!r}, expected a number above 0")
    return value


def _pattern(value: Any, name: str, file: Path, *types: type) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(f"{file}: {name} is {value!r}, expected a mapping of names to numbers")
    for key, item in value.items():
        _number(item, f"{name}[{key!r}]", file, *types)
        try:
            re.compile(key)
        except re.error as error:
            raise AdapterError(
                f"{file}: {name} names {key!r}, which is no regular expression ({error})"
            ) from error
    return value
