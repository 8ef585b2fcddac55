"""Which experts of each layer a process holds."""

import operator
from collections.abc import Iterable, Mapping

import torch

from k3tune.errors import ConfigError
from k3tune.files import shown
from k3tune.published.architecture import Architecture

Experts = Iterable[int] | Mapping[int, Iterable[int]]
"""The same experts of every MoE layer, or by zero-based layer."""
LayerExperts = Mapping[int, tuple[int, ...]]
"""Global ids by zero-based layer, in the order of rows; as many in each layer."""


def layer_experts(experts: Experts | None, architecture: Architecture) -> LayerExperts:
    """Check a choice of experts; None is all.

    Raises:
        ConfigError: if it is empty, names an expert twice or one the model does not have, or names
            other layers than the MoE layers, or not as many experts in each.
    """
    layers = architecture.moe_layers
    if not isinstance(experts, Mapping):
        return dict.fromkeys(layers, expert_ids(experts, architecture.num_experts))
    if other := sorted(set(experts) ^ set(layers)):
        raise ConfigError(
            f"experts and the MoE layers differ in layer {other[0]}, expected layers {layers[0]} "
            f"to {layers[-1]}"
        )
    found = {layer: expert_ids(experts[layer], architecture.num_experts) for layer in layers}
    if len(counts := {len(ids) for ids in found.values()}) > 1:
        raise ConfigError(
            f"experts names {min(counts)} to {max(counts)} experts a layer, expected as many in "
            "each"
        )
    return found


def expert_ids(experts: Iterable[int] | None, num_experts: int) -> tuple[int, ...]:
    """Check a choice of experts; None is all.

    Raises:
        ConfigError: if it is empty, names an expert twice, or one the model does not have.
    """
    if experts is None:
        return tuple(range(num_experts))
    try:
        chosen = tuple(experts)
        ids = tuple(map(operator.index, chosen))
    except TypeError as error:
        raise ConfigError(
            f"experts is {shown(experts)}, expected a sequence of expert ids: pass ints, or None "
            "for all"
        ) from error
    if not ids:
        raise ConfigError("experts is empty, expected at least one expert id (None means all)")
    # a mask would pass as experts 0 and 1
    masks = [e for e in chosen if isinstance(e, bool) or getattr(e, "dtype", None) == torch.bool]
    if masks:
        raise ConfigError(
            f"experts holds {masks[0]!r}, expected expert ids: name them, a mask is not taken"
        )
    outside = [expert for expert in ids if not 0 <= expert < num_experts]
    if outside:
        raise ConfigError(
            f"experts names {outside[0]}, expected ids from 0 to {num_experts - 1}: the checkpoint "
            f"has {num_experts} experts a layer"
        )
    if len(set(ids)) != len(ids):
        twice = next(expert for place, expert in enumerate(ids) if expert in ids[:place])
        raise ConfigError(f"experts names {twice} twice, expected each id once: leave one out")
    return ids
