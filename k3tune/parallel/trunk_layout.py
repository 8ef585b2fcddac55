"""Where the frozen weights of a unit lie in its bytes, and which of them a rank keeps.

A unit is a module whose weights are gathered together. Its bytes are cut into equal parts, one a
rank; every weight, and every part, starts on a boundary of ``ALIGN`` bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from k3tune.errors import ConfigError
from k3tune.lora.layers import Factor
from k3tune.model.latent_moe import PackedProjection
from k3tune.parallel.trunk_bytes import aligned, part_bytes

_WRAPPED = ".base_layer."


class Owner(NamedTuple):
    """An attribute of a module that shows a weight."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Slot:
    """One weight of a unit.

    Attributes:
        name: of the parameter in the base, as without adapters.
        owners: the attributes that show it.
        offset: first byte in the unit.
        shape, dtype: of the weight.
    """

    name: str
    owners: tuple[Owner, ...]
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The bytes of one unit over ``ranks`` ranks.

    Attributes:
        slots: its weights, in order.
        part_bytes: what each rank keeps, padding included.
        ranks: number of parts.
    """

    slots: tuple[Slot, ...]
    part_bytes: int
    ranks: int

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered unit."""
        return self.part_bytes * self.ranks

    def kept(self, slot: Slot, rank: int) -> tuple[int, int] | None:
        """Bytes ``[begin, end)`` of a weight that lie in a rank's part; None if there are none."""
        first = rank * self.part_bytes
        begin = max(first - slot.offset, 0)
        end = min(first + self.part_bytes - slot.offset, slot.size_bytes)
        return (begin, end) if begin < end else None


def lay_out(weights: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]], ranks: int) -> Layout:
    """Place a unit's weights one behind the other, with room for the tag at the very end."""
    slots, offset = [], 0
    for name, weight, owners in weights:
        slot = Slot(name, owners, offset, weight.shape, weight.dtype)
        slots.append(slot)
        offset += aligned(slot.size_bytes)
    return Layout(tuple(slots), part_bytes([slot.size_bytes for slot in slots], ranks), ranks)


def unit_weights(name: str, unit: nn.Module) -> list[tuple[str, nn.Parameter, tuple[Owner, ...]]]:
    """The weights of a module that are sharded: all but experts' bytes and adapters' factors.

    Args:
        name: of the module in the base.
        unit: the module.

    Returns:
        Name, parameter and the attributes that show it; a shared one stands here once.

    Raises:
        ConfigError: if one of them is to be trained.
    """
    found: dict[nn.Parameter, tuple[str, tuple[Owner, ...]]] = {}
    for path, module in unit.named_modules():
        if isinstance(module, PackedProjection | Factor):
            continue
        for attribute, weight in module.named_parameters(recurse=False):
            full = ".".join(part for part in (name, path, attribute) if part)
            if weight.requires_grad:
                raise ConfigError(
                    f"{full} requires a gradient, expected frozen weights: only a frozen trunk can "
                    "be sharded; call requires_grad_(False) on the base and train an adapter"
                )
            first, owners = found.get(weight, (full.replace(_WRAPPED, "."), ()))
            found[weight] = (first, (*owners, Owner(module, attribute)))
    return [(first, weight, owners) for weight, (first, owners) in found.items()]


def check_not_shared(
    model: nn.Module, weights: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]]
) -> None:
    """Refuse weights of a unit that other parts of the model use too.

    Raises:
        ConfigError: naming such a weight.
    """
    places = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    for name, weight, owners in weights:
        if places[id(weight)] != len(owners):
            raise ConfigError(
                f"{name} is shared with another part of the model, expected a weight of one layer: "
                "what is gathered for one layer is not there for another; untie it"
            )
