"""An adapter's values and gradients under the keys of its file."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from k3tune.lora.inject import active_adapter, adapter_layers, base_of, local_experts
from k3tune.lora.keys import FactorName, Slot
from k3tune.lora.layers import AdapterLayer, LoraPackedProjection
from k3tune.lora.targets import RankAlpha


class Entry(NamedTuple):
    """One tensor of an adapter file: its slot, and the factor it is a part of."""

    slot: Slot
    factor: nn.Parameter

    @property
    def value(self) -> Tensor:
        """The entry's values, a view of the factor."""
        return self.slot.part(self.factor.detach())


def adapter_state(model: PeftModel, adapter_name: str | None = None) -> dict[str, Tensor]:
    """Copies of an adapter's factors under the keys of its file.

    An adapter loaded from a file has that file's keys, one entry an expert where the file has one
    (of the local experts only); an attached one has the keys :func:`save_adapter` writes.

    Args:
        model: with an adapter.
        adapter_name: None is the active one.

    Returns:
        Key -> fp32 tensor on the factor's device, not connected to the model.
    """
    return {entry.slot.key: entry.value.clone() for entry in _entries(model, adapter_name)}


def adapter_gradients(model: PeftModel, adapter_name: str | None = None) -> dict[str, Tensor]:
    """Copies of the gradients of an adapter's factors under the keys of its file.

    Args:
        model: with an adapter.
        adapter_name: None is the active one.

    Returns:
        Key -> fp32 tensor of the entry's shape; zeros where there is no gradient.
    """
    gradients = {}
    for slot, factor in _entries(model, adapter_name):
        if factor.grad is None:
            gradients[slot.key] = torch.zeros_like(slot.part(factor.detach()))
        else:
            gradients[slot.key] = slot.part(factor.grad.detach()).clone()
    return gradients


def _entries(model: PeftModel, adapter_name: str | None) -> Iterator[Entry]:
    adapter_name = active_adapter(model, adapter_name)
    layers = adapter_layers(model, adapter_name)
    for name, slots in slots_of(model, adapter_name).items():
        yield from layer_entries(layers[name], adapter_name, slots)


def slots_of(model: PeftModel, adapter_name: str) -> dict[str, tuple[Slot, ...]]:
    """The entries of each layer: those of the file an adapter came from, or those it would have."""
    base = base_of(model)
    slots = {}
    for name, layer in adapter_layers(model, adapter_name).items():
        known = layer.slots.get(adapter_name)
        if known is None:
            known = written_slots(layer, name, adapter_name, local_experts(base, name))
        slots[name] = known
    return slots


def layer_entries(
    layer: AdapterLayer, adapter_name: str, slots: tuple[Slot, ...]
) -> Iterator[Entry]:
    """The entries of one layer."""
    for slot in slots:
        yield Entry(slot, layer.factor(adapter_name, slot.half))


def written_slots(
    layer: AdapterLayer, name: str, adapter_name: str, experts: list[int] | None
) -> tuple[Slot, ...]:
    """The entries k3tune writes for a layer: A and B whole, stacked where there are experts.

    Experts that differ in rank or alpha cannot be stacked under one config: theirs are written
    one by one, and those without factors are left out.
    """
    if not isinstance(layer, LoraPackedProjection) or adapter_name not in layer.expert_ranks:
        return tuple(Slot(FactorName(name, None, half).key, half) for half in "AB")
    slots = []
    shared = layer.shared.get(adapter_name, "")
    for row, rank in enumerate(layer.expert_ranks[adapter_name]):
        expert = row if experts is None else experts[row]
        for half in "AB" if rank else "":
            if half in shared:
                continue
            slots.append(Slot(FactorName(name, expert, half).key, half, row, rank))
    for half in shared:
        slots.append(Slot(FactorName(name, None, half).key, half, 0, layer.r[adapter_name]))
    return tuple(slots)


def ranks_and_alphas(
    layer: AdapterLayer, name: str, adapter_name: str, experts: list[int] | None
) -> dict[str, RankAlpha]:
    """Rank and alpha of a layer's module, or of each adapted expert where these differ."""
    if not isinstance(layer, LoraPackedProjection) or adapter_name not in layer.expert_ranks:
        return {name: RankAlpha(layer.r[adapter_name], layer.lora_alpha[adapter_name])}
    found = {}
    for row, rank in enumerate(layer.expert_ranks[adapter_name]):
        if rank:
            expert = row if experts is None else experts[row]
            owner = FactorName(name, expert, "A").owner
            found[owner] = RankAlpha(rank, layer.expert_alphas[adapter_name][row])
    return found
