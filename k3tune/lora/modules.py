"""Sizes of the modules an adapter can adapt, known from a config alone. Loads no torch."""

from dataclasses import replace
from typing import NamedTuple

from k3tune.published.architecture import Architecture
from k3tune.published.tensor_table import TEXT_PREFIX, text_tensors

_LINEAR_GROUPS = ("attention", "latent_projections", "shared_experts", "dense_mlp")
_WEIGHT = ".weight"
_PACKED = ".weight_packed"
_ONE_EXPERT = ".experts.0."


class ModuleShape(NamedTuple):
    """A projection: ``num_experts`` of them stacked, or (None) a single one."""

    in_features: int
    out_features: int
    num_experts: int | None = None


def module_shapes(architecture: Architecture) -> dict[str, ModuleShape]:
    """Every module that can take factors, by its name in the model.

    The same names and sizes as :func:`k3tune.lora.targets.adaptable_modules` finds in a model.
    """
    shapes = {}
    # one expert stands for all: the full table has half a million rows
    for name, spec in text_tensors(replace(architecture, num_experts=1)).items():
        module = name.removeprefix(TEXT_PREFIX)
        if _ONE_EXPERT in module and module.endswith(_PACKED):
            rows, columns = spec.shape
            owner = module.removesuffix(_PACKED).replace(_ONE_EXPERT, ".experts.")
            shapes[owner] = ModuleShape(2 * columns, rows, architecture.num_experts)
        elif spec.group in _LINEAR_GROUPS and module.endswith(_WEIGHT) and len(spec.shape) == 2:
            rows, columns = spec.shape
            shapes[module.removesuffix(_WEIGHT)] = ModuleShape(columns, rows)
    return shapes
