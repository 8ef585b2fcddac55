"""The modules an export writes: their matrices, and the config that names them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from k3tune.lora.export.capabilities import Engine
from k3tune.lora.export.factors import ModuleFactors
from k3tune.lora.keys import FactorName
from k3tune.lora.modules import ModuleShape
from k3tune.lora.targets import RankAlpha, config_fields, whole_numbers
from k3tune.published.safetensors_files import StoredTensor

SERVED_LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""What servers call the experts' projections in ``target_modules``."""
_EXPERT_SUFFIX = re.compile(r"experts\.(w[123])$")


@dataclass(frozen=True)
class WrittenModule:
    """One module of an export.

    Attributes:
        name: of the module.
        shape: of the module.
        source: its factors; None writes zeros.
        shared: the halves that are one matrix for all experts ("", "A", "B" or "AB").
        stacked: experts in one tensor a half.
        size: rank and alpha written.
        sizes: those of experts that keep their own; else empty.
        folds: what is multiplied into ``folded`` of an expert, where that is not 1.
        folded: the half the folds go to.
        dtypes: of A and B.
    """

    name: str
    shape: ModuleShape
    source: ModuleFactors | None
    shared: str
    stacked: bool
    size: RankAlpha
    sizes: Mapping[int, RankAlpha]
    folds: Mapping[int | None, float]
    folded: str
    dtypes: Mapping[str, torch.dtype]

    @property
    def experts(self) -> Sequence[int | None]:
        """Ids of the experts written; ``(None,)`` for a single module."""
        if self.shape.num_experts is None:
            return (None,)
        return tuple(self.sizes) or range(self.shape.num_experts)

    def matrix_shape(self, half: str, expert: int | None) -> tuple[int, int]:
        """Shape of one A or B."""
        size = self.sizes.get(expert, self.size) if expert is not None else self.size
        rank = size.rank
        return (rank, self.shape.in_features) if half == "A" else (self.shape.out_features, rank)

    @cached_property
    def _adapted(self) -> frozenset[int | None]:
        return frozenset(self.source.adapted if self.source is not None else ())

    def keeps_values(self, half: str) -> bool:
        """Whether every value of a half is written as it is stored."""
        if self.source is None:
            return True
        folded = half == self.folded and bool(self.folds)
        return not folded and self.source.halves[half].dtype == self.dtypes[half]

    def matrix(self, half: str, expert: int | None) -> Tensor:
        """One A or B as it is written."""
        shape, dtype = self.matrix_shape(half, expert), self.dtypes[half]
        if self.source is None or expert not in self._adapted:
            return torch.zeros(shape, dtype=dtype)
        value = self.source.halves[half].read(expert)
        if half == self.folded and expert in self.folds:
            # one rounding, whatever the dtypes
            value = value.double() * self.folds[expert]
        value = value.to(dtype)
        if value.shape != shape:
            padded = torch.zeros(shape, dtype=dtype)
            padded[: value.shape[0], : value.shape[1]] = value
            value = padded
        return value

    def place(self, half: str, expert: int | None) -> StoredTensor | None:
        """Where bytes lie that are written as they are: of one matrix, or (stacked) of all."""
        if self.source is None or not self.keeps_values(half):
            return None
        found = self.source.halves[half]
        if self.stacked:
            same_rows = found.shared == (half in self.shared)
            same_rank = self.source.size.rank == self.size.rank
            return found.whole if same_rows and same_rank else None
        if half in self.shared:
            expert = self.source.adapted[0]
        if found.place is None or expert not in self._adapted:
            return None
        stored = found.place(expert)
        return stored if stored.shape[-2:] == self.matrix_shape(half, expert) else None


@dataclass
class Layout:
    """An export: modules in order, and what is said about them.

    Attributes:
        engine, form: of the consumer.
        modules: in the order they are written.
        use_rslora: as the written config says.
        dropped: modules left out, by what the user said.
        zeros: modules or experts written as zeros, with the reason.
        changes: sentences on what is not written as it was.
    """

    engine: Engine
    form: str | None
    modules: list[WrittenModule] = field(default_factory=list)
    use_rslora: bool = False
    dropped: dict[str, list[str]] = field(default_factory=dict)
    zeros: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The largest rank written."""
        return max(module.size.rank for module in self.modules)

    def config_fields(self, names: Iterable[str]) -> dict[str, Any]:
        """Fields of ``adapter_config.json``; ``names`` are all modules a suffix might match."""
        if self.engine.leaf_targets:
            leaves = {module.name.rpartition(".")[2] for module in self.modules}
            size = self.modules[0].size
            fields: dict[str, Any] = {
                "target_modules": sorted({SERVED_LEAVES.get(leaf, leaf) for leaf in leaves}),
                "layers_to_transform": None,
                "r": size.rank,
                "lora_alpha": size.alpha,
                "rank_pattern": {},
                "alpha_pattern": {},
            }
        else:
            fields = _pattern_fields(self.modules, names)
        for name in ("lora_alpha", "alpha_pattern"):
            fields[name] = whole_numbers(fields[name])
        return fields


def _pattern_fields(modules: Sequence[WrittenModule], names: Iterable[str]) -> dict[str, Any]:
    """Fields with patterns; experts written by 2-D keys are named with their number."""
    known = dict.fromkeys(names)
    chosen: dict[str, RankAlpha] = {}
    for module in modules:
        known.setdefault(module.name)
        if not module.sizes:
            chosen[module.name] = module.size
            continue
        del known[module.name]
        total = module.shape.num_experts or 0
        known |= dict.fromkeys(FactorName(module.name, e, "A").owner for e in range(total))
        chosen |= {FactorName(module.name, e, "A").owner: s for e, s in module.sizes.items()}
    fields = config_fields(chosen, known)
    if any(module.stacked for module in modules):
        return fields
    for name in ("rank_pattern", "alpha_pattern"):
        fields[name] = {_numbered(key): value for key, value in fields[name].items()}
    targets = fields["target_modules"]
    if any(_EXPERT_SUFFIX.search(target) for target in targets):
        # a list is compared by its ends, in which a number cannot be left open
        ends = "|".join(_numbered(re.escape(target)) for target in targets)
        fields["target_modules"] = rf"(.*\.)?({ends})"
    return fields


def _numbered(pattern: str) -> str:
    return re.sub(r"experts(\\?)\.(w[123])$", r"experts\\.\\d+\\.\2", pattern)
