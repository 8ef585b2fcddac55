"""How many numbers an adapter has, and how many of them one rank holds."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from k3tune.lora.modules import ModuleShape, module_shapes
from k3tune.lora.spec import LoraSpec
from k3tune.lora.targets import RankAlpha, choose_names, group_of
from k3tune.parallel.shards import ExpertShards
from k3tune.published.architecture import Architecture

FACTOR_BYTES = 4
"""Factors are FP32: they are their own optimizer masters."""


class FactorSize(NamedTuple):
    """Numbers of a module's A and B.

    Attributes:
        each: of one expert's own factors, summed over A and B.
        shared: of factors that a module or all its experts have once.
    """

    each: int
    shared: int


@dataclass(frozen=True)
class AdapterSize:
    """Numbers of an adapter.

    Attributes:
        by_group: over all experts, by target group.
        each: of one expert of every layer together: times a rank's experts, what it holds of them.
        shared: the rest, which every rank holds.
        ranks: LoRA rank of each adapted module, by its name.
    """

    by_group: dict[str, int]
    each: int
    shared: int
    ranks: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Numbers of the whole adapter."""
        return sum(self.by_group.values())

    def of_rank(self, shards: ExpertShards) -> "RankFactors":
        """What the fullest rank of an expert-parallel group holds."""
        return RankFactors(self.each * max(shards.sizes), self.shared)


class RankFactors(NamedTuple):
    """Numbers of one rank's factors: its own experts', and those every rank has."""

    experts: int
    replicated: int

    @property
    def total(self) -> int:
        """Both."""
        return self.experts + self.replicated


def adapter_size(architecture: Architecture, spec: LoraSpec) -> AdapterSize:
    """Sizes of the adapter that ``attach_lora`` would make, from the config alone.

    Raises:
        AdapterError: if a target, layer or pattern of the spec matches nothing.
    """
    shapes = module_shapes(architecture)
    chosen: dict[str, RankAlpha] = choose_names(spec, shapes)
    by_group: Counter[str] = Counter()
    each = shared = 0
    for name, size in chosen.items():
        factors = _factors(name, shapes[name], size.rank, spec.form)
        by_group[group_of(name)] += factors.each * architecture.num_experts + factors.shared
        each += factors.each
        shared += factors.shared
    ranks = {name: size.rank for name, size in chosen.items()}
    return AdapterSize(dict(by_group), each, shared, ranks)


def _factors(name: str, shape: ModuleShape, rank: int, form: str) -> FactorSize:
    A, B = rank * shape.in_features, rank * shape.out_features
    if shape.num_experts is None:
        return FactorSize(0, A + B)
    if form == "per_expert":
        return FactorSize(A + B, 0)
    # the latent's side is shared: outputs of w2, inputs of w1 and w3
    return FactorSize(A, B) if name.endswith(".w2") else FactorSize(B, A)
