"""What an adapter file adapts: its tensors, matched to the base's modules and checked.

The tensors decide: which modules, which rank, which form. The config gives alpha; where its
``r``, ``rank_pattern`` or ``target_modules`` say something else, :func:`disagreements` says so.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from k3tune.errors import AdapterError
from k3tune.lora.keys import FactorName, Slot, parse_key
from k3tune.lora.modules import ModuleShape
from k3tune.lora.read import AdapterConfig, AdapterFiles
from k3tune.lora.spec import pattern_matches
from k3tune.lora.targets import RankAlpha, layer_of, matching_value, near_names
from k3tune.published.safetensors_files import StoredTensor

_SHOWN = 5
Modules = Mapping[str, ModuleShape]


@dataclass
class HalfPlan:
    """Tensors of a module's A or B: one for the whole, or one an expert (by global id)."""

    whole: tuple[str, StoredTensor] | None = None
    experts: dict[int, tuple[str, StoredTensor]] = field(default_factory=dict)

    def ranks(self, half: str) -> dict[int | None, int]:
        """Rank by expert; under None the whole's."""
        axis = -2 if half == "A" else -1
        tensors: dict[int | None, tuple[str, StoredTensor]] = dict(self.experts.items())
        if self.whole is not None:
            tensors[None] = self.whole
        return {expert: stored.shape[axis] for expert, (_, stored) in tensors.items()}


@dataclass
class ModulePlan:
    """Tensors of one module, and what they and the config say.

    Attributes:
        halves: A and B.
        size: the largest rank, and the module's alpha.
        experts: rank and alpha of the experts that have factors of their own, by global id.
    """

    halves: dict[str, HalfPlan] = field(default_factory=lambda: {"A": HalfPlan(), "B": HalfPlan()})
    size: RankAlpha = field(default_factory=lambda: RankAlpha(0, 0))
    experts: dict[int, RankAlpha] = field(default_factory=dict)

    def owners(self, name: str) -> Iterator[tuple[str, RankAlpha]]:
        """Names with their rank and alpha, as an adapter's config sees them."""
        if not self.experts:
            yield name, self.size
        for expert, size in self.experts.items():
            yield FactorName(name, expert, "A").owner, size


def match_tensors(files: AdapterFiles, modules: Modules) -> dict[str, ModulePlan]:
    """Match every tensor to its module, in the order of ``modules``.

    Args:
        files: the adapter.
        modules: the base's adaptable modules; ``num_experts`` counts all experts, local or not.

    Raises:
        AdapterError: if keys match nothing, a factor is there twice, halves or experts' halves are
            missing, shapes do not fit, or ranks of A and B differ.
    """
    plans: dict[str, ModulePlan] = {}
    unmatched = []
    for key, stored in files.tensors.items():
        factor = parse_key(key)
        module = None if factor is None else modules.get(factor.module)
        if factor is None or module is None or not _has_expert(module, factor.expert):
            unmatched.append(key)
            continue
        _check_shape(key, stored, factor, module)
        half = plans.setdefault(factor.module, ModulePlan()).halves[factor.half]
        twice = half.whole if factor.expert is None else half.experts.get(factor.expert)
        if twice is not None:
            raise AdapterError(f"{files.folder}: {key} and {twice[0]} name the same factor")
        if factor.expert is None:
            half.whole = key, stored
        else:
            half.experts[factor.expert] = key, stored
    if unmatched:
        raise AdapterError(_unmatched(files, unmatched, modules))
    if not plans:
        raise AdapterError(f"{files.folder}: expected LoRA factors, found no tensor")
    for name, plan in plans.items():
        _complete(name, plan, files.config)
    return {name: plans[name] for name in modules if name in plans}


def file_slots(plan: ModulePlan, packed: bool, rows: Mapping[int, int]) -> tuple[Slot, ...]:
    """The file's entries of a module that a process with these experts (id -> row) holds."""
    slots = []
    for half, tensors in plan.halves.items():
        if tensors.whole is not None:
            key, stored = tensors.whole
            one_of_stack = packed and len(stored.shape) == 2
            slots.append(Slot(key, half, 0, plan.size.rank) if one_of_stack else Slot(key, half))
        for expert, (key, _) in tensors.experts.items():
            if expert in rows:
                slots.append(Slot(key, half, rows[expert], plan.experts[expert].rank))
    return tuple(slots)


def disagreements(
    files: AdapterFiles, plans: Mapping[str, ModulePlan], modules: Modules
) -> list[str]:
    """Sentences on what the config says and the tensors do not."""
    config = files.config
    found = [
        *_rank_disagreements(config, plans),
        *_target_disagreements(config, plans, modules),
        *_missing_experts(plans, modules),
    ]
    owners = [owner for name, plan in plans.items() for owner, _ in plan.owners(name)]
    for field_name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field_name):
            if not any(pattern_matches(pattern, owner) for owner in owners):
                found.append(f"{field_name} names {pattern!r}, which fits no module with tensors")
    return found


def _has_expert(module: ModuleShape, expert: int | None) -> bool:
    return expert is None or expert < (module.num_experts or 0)


def _check_shape(key: str, stored: StoredTensor, factor: FactorName, module: ModuleShape) -> None:
    inner, outer = module.in_features, module.out_features
    matrix = f"(r, {inner})" if factor.half == "A" else f"({outer}, r)"
    expected, stacks = matrix, (0, 0)
    if module.num_experts is not None and factor.expert is None:
        stacks = (1, module.num_experts)
        expected = f"(1 or {module.num_experts}, {matrix[1:]} or {matrix}"
    *stack, rows, columns = stored.shape if len(stored.shape) > 1 else (0, 0)
    fits = columns == inner if factor.half == "A" else rows == outer
    if (
        not fits
        or 0 in stored.shape
        or not (stack == [] or (len(stack) == 1 and stack[0] in stacks))
    ):
        raise AdapterError(
            f"{stored.file}: tensor {key}: expected {expected}, found {stored.shape}: is the "
            "adapter of another base?"
        )


def _complete(name: str, plan: ModulePlan, config: AdapterConfig) -> None:
    """Check that both halves are there and agree; derive ranks and alphas."""
    ranks = {half: tensors.ranks(half) for half, tensors in plan.halves.items()}
    for half, found in ranks.items():
        if None in found and len(found) > 1:
            raise AdapterError(
                f"{name}: lora_{half} is there both stacked and expert by expert, expected one form"
            )
    for half, other in (("A", "B"), ("B", "A")):
        if None in ranks[half] and ranks[half]:
            continue
        lost = ranks[other].keys() - ranks[half].keys() if ranks[half] else ranks[other].keys()
        lost = {expert for expert in lost if expert is not None or not ranks[half]}
        if lost:
            keys = [
                FactorName(name, expert, half).key for expert in sorted(lost, key=lambda e: e or 0)
            ]
            raise AdapterError(
                f"{name}: expected a lora_A and a lora_B of each factor, found no "
                f"{listed(keys)}: the file is incomplete"
            )
    whole = {found[None] for found in ranks.values() if None in found}
    sizes = {}
    for expert in sorted({e for found in ranks.values() for e in found if e is not None}):
        own = {found[expert] for found in ranks.values() if expert in found} | whole
        sizes[expert] = _one_rank(FactorName(name, expert, "A").owner, own)
    rank = max(sizes.values()) if sizes else _one_rank(name, whole)

    def alpha(owner: str) -> float:
        return matching_value(config.alpha_pattern, owner, config.lora_alpha)

    plan.experts = {
        expert: RankAlpha(size, alpha(FactorName(name, expert, "A").owner))
        for expert, size in sizes.items()
    }
    plan.size = RankAlpha(rank, alpha(name))


def _one_rank(owner: str, ranks: set[int]) -> int:
    if len(ranks) > 1:
        raise AdapterError(
            f"{owner}: expected one rank of lora_A and lora_B, found "
            f"{' and '.join(map(str, sorted(ranks)))}: the file is damaged"
        )
    return next(iter(ranks))


def _unmatched(files: AdapterFiles, keys: list[str], modules: Modules) -> str:
    parsed = parse_key(keys[0])
    known = [FactorName(name, None, half).key for name in modules for half in "AB"]
    experts = [m.num_experts for m in modules.values() if m.num_experts is not None]
    hint = ""
    if parsed is not None and parsed.module in modules and parsed.expert is not None:
        hint = f" (the base has experts 0 to {max(experts, default=0) - 1})"
    elif keys[0].startswith("base_model.model.lm_head"):
        hint = " (the head takes no adapter: no server applies one)"
    return (
        f"{files.folder}: {len(keys)} of {len(files.tensors)} keys match nothing in the base{hint}:"
        f" {listed(keys)}; near names: {', '.join(near_names(keys[0], known, 3))}"
    )


def _rank_disagreements(config: AdapterConfig, plans: Mapping[str, ModulePlan]) -> Iterator[str]:
    differ = []
    for name, plan in plans.items():
        for owner, size in plan.owners(name):
            said = matching_value(config.rank_pattern, owner, config.r)
            if said != size.rank:
                differ.append(f"{owner} ({said}, tensors {size.rank})")
    if differ:
        yield (
            f"r and rank_pattern say another rank than the tensors of {len(differ)} modules: "
            f"{listed(differ)}; the tensors' rank is used, also in the scale"
        )


def _target_disagreements(
    config: AdapterConfig, plans: Mapping[str, ModulePlan], modules: Modules
) -> Iterator[str]:
    if config.targets is None:
        return
    targeted = {name for name in modules if _is_targeted(config, name, modules[name])}
    if more := [name for name in modules if name in targeted and name not in plans]:
        yield (
            f"target_modules names {len(more)} modules without tensors, which stay unadapted: "
            f"{listed(more)}"
        )
    if fewer := [name for name in plans if name not in targeted]:
        yield (
            f"target_modules leaves out {len(fewer)} modules that have tensors and are adapted: "
            f"{listed(fewer)}"
        )


def _is_targeted(config: AdapterConfig, name: str, module: ModuleShape) -> bool:
    """PEFT's rule, for the model's names, the published ones, and those of single experts."""
    if config.layers and layer_of(name) not in config.layers:
        return False
    names = [name, f"language_model.{name}"]
    if module.num_experts is not None:
        names += [FactorName(name, 0, "A").owner]
    if isinstance(config.targets, str):
        if config.targets == "all-linear":
            return True
        return any(re.fullmatch(config.targets, candidate) for candidate in names)
    targets = config.targets or ()
    return any(f".{candidate}".endswith(f".{t}") for candidate in names for t in targets)


def _missing_experts(plans: Mapping[str, ModulePlan], modules: Modules) -> Iterator[str]:
    lacking, count = [], 0
    for name, plan in plans.items():
        module = modules[name]
        if module.num_experts is not None and plan.experts:
            missing = module.num_experts - len(plan.experts)
            count += missing
            if missing:
                lacking.append(f"{name} ({missing} of {module.num_experts})")
    if lacking:
        yield f"{count} experts have no factors and stay unadapted: {listed(lacking)}"


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
