"""Which modules an adapter may and does adapt, and how a PEFT config names them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from k3tune.errors import AdapterError
from k3tune.lora.spec import GROUPS, LoraSpec, pattern_matches

if TYPE_CHECKING:
    from torch import nn

    from k3tune.model.latent_moe import PackedProjection

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# A server answers with the base's head, and the loss reads its weight: neither would see factors.
_HEAD = "lm_head"


class RankAlpha(NamedTuple):
    """Rank and alpha of one module."""

    rank: int
    alpha: float


def adaptable_modules(base: "nn.Module") -> "dict[str, nn.Linear | PackedProjection]":
    """The modules that can take factors, by their names in the base (adapted ones included)."""
    # an export needs this file's names, and neither PEFT nor a model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    from k3tune.model.latent_moe import PackedProjection

    modules: dict[str, nn.Linear | PackedProjection] = {}
    inside: str | None = None
    for name, module in base.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside, module = f"{name}.", module.get_base_layer()
        if isinstance(module, nn.Linear | PackedProjection) and name != _HEAD:
            modules[name] = module
    return modules


def layer_of(name: str) -> int | None:
    """Zero-based decoder layer of a module; None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def group_of(name: str) -> str:
    """The target group a module belongs to, or ``"other"``."""
    return next((g for g, pattern in GROUPS.items() if pattern_matches(pattern, name)), "other")


def near_names(name: str, names: Iterable[str], count: int = 5) -> list[str]:
    """The names most like ``name``, or the first ones where none is like it."""
    names = list(dict.fromkeys(names))
    return get_close_matches(name, names, count, cutoff=0.6) or names[:count]


def choose_modules(spec: LoraSpec, base: "nn.Module") -> dict[str, RankAlpha]:
    """The modules ``spec`` targets, with their rank and alpha, in the model's order.

    Raises:
        AdapterError: naming the first target, layer or pattern that matches nothing.
    """
    others = {name: type(module).__name__ for name, module in base.named_modules() if name}
    return choose_names(spec, adaptable_modules(base), others)


def choose_names(
    spec: LoraSpec, adaptable: Iterable[str], others: Mapping[str, str] = MappingProxyType({})
) -> dict[str, RankAlpha]:
    """:func:`choose_modules` among names.

    Args:
        spec: what to adapt.
        adaptable: names of the modules that can take factors, in the model's order.
        others: class by name of modules to say, in an error, that they cannot be adapted.

    Raises:
        AdapterError: naming the first target, layer or pattern that matches nothing.
    """
    modules = list(adaptable)
    if spec.layers is not None:
        last = max((layer_of(name) or 0 for name in modules), default=0)
        if spec.layers[-1] > last:
            raise AdapterError(
                f"layer {spec.layers[-1]} is to be adapted, expected layers from 0 to {last}: "
                f"the base has {last + 1}"
            )
        modules = [name for name in modules if layer_of(name) in spec.layers]
    chosen = set()
    for target in spec.targets:
        pattern = GROUPS.get(target, target)
        matched = {name for name in modules if pattern_matches(pattern, name)}
        if not matched:
            raise AdapterError(_no_match("target", target, modules, others, spec.layers))
        chosen |= matched
    names = [name for name in modules if name in chosen]
    for pattern in (*spec.rank_pattern, *spec.alpha_pattern):
        if not any(pattern_matches(pattern, name) for name in names):
            raise AdapterError(_no_match("pattern", pattern, names, others, spec.layers))
    return {
        name: RankAlpha(
            matching_value(spec.rank_pattern, name, spec.rank),
            matching_value(spec.alpha_pattern, name, spec.alpha),
        )
        for name in names
    }


def matching_value(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that fits ``name``."""
    return next((v for key, v in patterns.items() if pattern_matches(key, name)), default)


def _no_match(
    what: str,
    pattern: str,
    names: Iterable[str],
    others: Mapping[str, str],
    layers: tuple[int, ...] | None,
) -> str:
    where = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
    other = [f"{name} ({kind})" for name, kind in others.items() if pattern_matches(pattern, name)]
    if what == "target" and other and pattern not in GROUPS and not where:
        return (
            f"target {pattern!r} fits only modules that cannot be adapted, such as {other[0]}: "
            f"name linear layers inside the decoder, or groups of {', '.join(GROUPS)}"
        )
    known = [*GROUPS] if what == "target" else []
    ends = [".".join(name.split(".")[-parts:]) for parts in (1, 2) for name in names]
    return (
        f"{what} {pattern!r} matches no module{where}; near names: "
        f"{', '.join(near_names(pattern, [*known, *ends]))}"
    )


def config_fields(chosen: Mapping[str, RankAlpha], names: Iterable[str]) -> dict[str, Any]:
    """The fields of a PEFT config that name exactly the chosen modules, with their ranks.

    Args:
        chosen: the adapted modules.
        names: all modules a suffix might match.

    Returns:
        ``target_modules``, ``layers_to_transform``, ``r``, ``lora_alpha``, ``rank_pattern``,
        ``alpha_pattern``.
    """
    others = [name for name in names if name not in chosen]
    targets, layers = _suffixes(chosen, others), None
    if any(_LAYER.search(f"{target}.") for target in targets):
        # a subset of layers is said once rather than in every name
        used = {layer_of(name) for name in chosen}
        inside = _suffixes(chosen, [name for name in others if layer_of(name) in used])
        if None not in used and not any(_LAYER.search(f"{target}.") for target in inside):
            targets, layers = inside, sorted(layer for layer in used if layer is not None)
    rank, rank_pattern = _by_suffix({name: item.rank for name, item in chosen.items()})
    alpha, alpha_pattern = _by_suffix({name: item.alpha for name, item in chosen.items()})
    return {
        "target_modules": targets,
        "layers_to_transform": layers,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
    }


def whole_numbers(value: Any) -> Any:
    """Alphas as integers where they are: some servers take nothing else."""
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    return int(value) if float(value).is_integer() else value


def _by_suffix(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The commonest value, and suffixes for the names that have another."""
    [(default, _)] = Counter(values.values()).most_common(1)
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            owners = [name for name, found in values.items() if found == value]
            rest = [name for name, found in values.items() if found != value]
            pattern |= dict.fromkeys(_suffixes(owners, rest), value)
    return default, pattern


def _suffixes(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Shortest ends of ``names`` that are no end of ``others``, each starting at a whole word."""
    taken = {suffix for other in others for suffix in _ends(other)}
    found = set()
    for name in names:
        ends = [end for end in _ends(name) if not end.split(".")[0].isdigit()]
        found.add(next((end for end in ends if end not in taken), name))
    return sorted(found)


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]
