"""An adapter's factors by module and expert, whatever files they lie in, read when asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3tune.errors import AdapterError, K3TuneError
from k3tune.lora.keys import CONFIG_NAME, parse_key
from k3tune.lora.modules import ModuleShape, module_shapes
from k3tune.lora.plan import HalfPlan, ModulePlan, match_tensors
from k3tune.lora.read import AdapterFiles, FactorReader, read_adapter, stored_dtype
from k3tune.lora.spec import lora_scaling
from k3tune.lora.targets import RankAlpha
from k3tune.published.architecture import parse_config, read_config
from k3tune.published.safetensors_files import StoredTensor

# Where a run of k3tune.train keeps the adapter in a checkpoint's folder.
_CHECKPOINT_ADAPTER = "adapter"


@dataclass(frozen=True)
class Half:
    """A or B of a module.

    Attributes:
        shared: one matrix stands for all experts (of a single module: for itself).
        dtype: as stored.
        read: expert id (None where there are none) -> ``[r, in]`` or ``[out, r]`` as stored.
        place: expert id -> where its matrix lies in a file, byte for byte as ``read`` gives it;
            None where it is not stored so.
        whole: where all of it lies in order, if one stored tensor holds it.
    """

    shared: bool
    dtype: torch.dtype
    read: Callable[[int | None], Tensor]
    place: Callable[[int | None], StoredTensor] | None = None
    whole: StoredTensor | None = None


@dataclass(frozen=True)
class ModuleFactors:
    """Factors of one module.

    Attributes:
        shape: of the module.
        halves: ``"A"`` and ``"B"``.
        size: rank and alpha; of experts that differ the largest rank.
        experts: rank and alpha by expert id where these are the experts' own, else empty; experts
            left out are not adapted.
    """

    shape: ModuleShape
    halves: Mapping[str, Half]
    size: RankAlpha
    experts: Mapping[int, RankAlpha]

    @cached_property
    def adapted(self) -> tuple[int | None, ...]:
        """Ids of the adapted experts; ``(None,)`` for a single module."""
        if self.shape.num_experts is None:
            return (None,)
        return tuple(self.experts) or tuple(range(self.shape.num_experts))

    @property
    def form(self) -> str | None:
        """The form of the experts' factors; None for a single module."""
        if self.shape.num_experts is None:
            return None
        shared = any(half.shared for half in self.halves.values())
        return "shared_outer" if shared else "per_expert"

    def size_of(self, expert: int | None) -> RankAlpha:
        """Rank and alpha of one expert."""
        return self.experts.get(expert, self.size) if expert is not None else self.size


@dataclass(frozen=True)
class AdapterSource:
    """An adapter directory's factors by module name, in the base's order where that is known."""

    files: AdapterFiles
    modules: Mapping[str, ModuleFactors]
    shapes: Mapping[str, ModuleShape]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What ``k3tune.json`` says, or nothing."""
        return self.files.metadata or {}

    @property
    def form(self) -> str | None:
        """The experts' form; "mixed" if modules differ, None without experts."""
        forms = {module.form for module in self.modules.values()} - {None}
        if len(forms) > 1:
            return "mixed"
        return next(iter(forms), None)

    def scaling(self, module: str, expert: int | None) -> float:
        """What the product of the stored factors is multiplied by."""
        size = self.modules[module].size_of(expert)
        return lora_scaling(size.alpha, size.rank, self.files.config.use_rslora)


def adapter_folder(path: str | Path) -> Path:
    """The adapter directory of ``path``: itself, or the one in a training checkpoint."""
    folder = Path(path)
    inner = folder / _CHECKPOINT_ADAPTER
    if not (folder / CONFIG_NAME).is_file() and (inner / CONFIG_NAME).is_file():
        return inner
    return folder


def base_folder(base: str | Path | None, files: AdapterFiles) -> Path | None:
    """A folder with the base's config: the one named, or the one the adapter remembers if there."""
    if base is not None:
        from k3tune.published.hub import resolve_checkpoint

        return resolve_checkpoint(base, weights=False)
    name = ((files.metadata or {}).get("base") or {}).get("name")
    if isinstance(name, str) and name and (Path(name) / "config.json").is_file():
        return Path(name)
    return None


def read_source(files: AdapterFiles, base: Path | None, reader: FactorReader) -> AdapterSource:
    """Match an adapter's tensors to modules; no factor is read yet.

    Args:
        files: from :func:`k3tune.lora.read.read_adapter`.
        base: a folder with the base's config; None takes the modules' sizes from the tensors.
        reader: stays open as long as factors are read.

    Raises:
        AdapterError: if the tensors do not fit the base, or each other.
    """
    if base is None:
        shapes = inferred_shapes(files.tensors)
    else:
        shapes = module_shapes(parse_config(read_config(base)))
    plans = match_tensors(files, shapes)
    modules = {name: _factors(plan, shapes[name], reader) for name, plan in plans.items()}
    return AdapterSource(files, modules, shapes)


def open_source(path: str | Path, base: str | Path | None, reader: FactorReader) -> AdapterSource:
    """:func:`read_source` of a directory or a training checkpoint."""
    files = read_adapter(adapter_folder(path))
    return read_source(files, base_folder(base, files), reader)


def inferred_shapes(tensors: Mapping[str, StoredTensor]) -> dict[str, ModuleShape]:
    """Sizes of the adapted modules, as the tensors themselves have them.

    Raises:
        AdapterError: if a key is no factor's, or nothing tells how many experts there are.
    """
    sides: dict[str, dict[str, int]] = {}
    experts: dict[str, int] = {}
    for key, stored in tensors.items():
        factor = parse_key(key)
        if factor is None or len(stored.shape) not in (2, 3):
            raise AdapterError(
                f"{stored.file}: {key} {stored.shape} is no LoRA factor, expected names that end "
                "in .lora_A.weight or .lora_B.weight"
            )
        side = stored.shape[-1] if factor.half == "A" else stored.shape[-2]
        sides.setdefault(factor.module, {}).setdefault(factor.half, side)
        if ".experts." in f"{factor.module}.":
            least = 1 if len(stored.shape) == 2 else stored.shape[0]
            least = max(least, 1 + (factor.expert or 0))
            experts[factor.module] = max(experts.get(factor.module, 1), least)
    # layers have the same number of experts, and an adapter may lack some in one of them
    total = max(experts.values(), default=0)
    return {
        name: ModuleShape(
            halves.get("A", 0), halves.get("B", 0), total if name in experts else None
        )
        for name, halves in sides.items()
    }


def _factors(plan: ModulePlan, shape: ModuleShape, reader: FactorReader) -> ModuleFactors:
    halves = {half: _half(found, shape, reader) for half, found in plan.halves.items()}
    return ModuleFactors(shape, halves, plan.size, plan.experts)


def _half(plan: HalfPlan, shape: ModuleShape, reader: FactorReader) -> Half:
    if plan.whole is None:
        tensors = dict(plan.experts)
        dtype = reduce(
            torch.promote_types, {stored_dtype(stored) for _, stored in tensors.values()}
        )

        def read_own(expert: int | None) -> Tensor:
            assert expert is not None, f"{list(tensors)[:3]=}"
            return reader.read_stored(*tensors[expert]).to(dtype)

        def place_own(expert: int | None) -> StoredTensor:
            assert expert is not None, f"{list(tensors)[:3]=}"
            return tensors[expert][1]

        alike = {stored_dtype(stored) for _, stored in tensors.values()} == {dtype}
        return Half(False, dtype, read_own, place_own if alike else None)
    key, stored = plan.whole
    stacked = len(stored.shape) == 3
    shared = shape.num_experts is None or not stacked or stored.shape[0] == 1

    def read(expert: int | None) -> Tensor:
        if not stacked:
            return reader.read_stored(key, stored)
        return reader.read_stored(key, stored, 0 if shared else expert)

    def place(expert: int | None) -> StoredTensor:
        if shared:
            return stored
        assert expert is not None, f"{key=}"
        size = stored.size_bytes // stored.shape[0]
        offset = stored.offset + expert * size
        return StoredTensor(stored.file, stored.dtype, stored.shape[1:], offset, size)

    return Half(shared, stored_dtype(stored), read, place, stored)


def renamed(files: AdapterFiles, names: Mapping[str, str]) -> AdapterFiles:
    """The files with some keys under other names."""
    tensors = {names.get(key, key): stored for key, stored in files.tensors.items()}
    if len(tensors) != len(files.tensors):
        raise AdapterError(f"{files.folder}: two keys name the same factor")
    return replace(files, tensors=tensors)


def checked_version(metadata: Mapping[str, Any]) -> int | None:
    """The adapter's version as its metadata say; None without."""
    version = metadata.get("version")
    if version is not None and type(version) is not int:
        raise K3TuneError(f"k3tune.json: version is {version!r}, expected an integer")
    return version
