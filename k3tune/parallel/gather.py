"""Factors of experts between the ranks that hold their rows and files that hold them whole."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3tune.lora.inject import adapter_layers
from k3tune.lora.layers import LoraPackedProjection
from k3tune.lora.state import layer_entries, written_slots
from k3tune.lora.targets import layer_of
from k3tune.parallel.expert_parallel import ExpertParallel, own_factors


class FactorRows:
    """Knows which factors of an adapter are spread over ranks by rows, and puts them together.

    Files are written by the run's first process; the ranks of its group send it their rows, in the
    order of experts' ids. Other groups hold copies and stay out.
    """

    def __init__(self, parallel: ExpertParallel, model: nn.Module, adapter_name: str) -> None:
        self._group, self._shards = parallel.group, parallel.shards
        self._model, self._adapter_name = model, adapter_name
        self._layers: dict[str, int] = {}
        for name, layer in adapter_layers(model, adapter_name).items():
            if isinstance(layer, LoraPackedProjection):
                number = layer_of(name)
                assert number is not None, f"{name=}"
                for _, half in own_factors(layer, adapter_name):
                    self._layers[f"{name}.lora_{half}"] = number

    @property
    def writes(self) -> bool:
        """Whether this process gets the whole factors."""
        return self._group.is_first and self._group.rank == 0

    def held(self, name: str) -> tuple[int, ...] | None:
        """Ids of the experts in this process's rows of a factor; None where it has it whole."""
        layer = self._layers.get(name)
        return None if layer is None else self._shards.experts(self._group.rank, layer)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole factor from that of this process's rows."""
        return (self._shards.num_experts, *shape[1:]) if name in self._layers else tuple(shape)

    def whole(self, name: str, value: Tensor) -> Tensor | None:
        """The whole factor, or a tensor laid out like it; every process must call it in one order.

        Args:
            name: ``"<module>.lora_A"`` or ``"<module>.lora_B"``.
            value: this process's rows.

        Returns:
            All rows by expert id where this process writes, else None.
        """
        layer = self._layers.get(name)
        if layer is None:
            return value if self.writes else None
        if not self._group.is_first:
            return None
        sizes = self._shards.sizes
        # the same shape from everyone: ranks may differ by one expert
        padded = value.new_zeros(max(sizes), *value.shape[1:])
        padded[: len(value)] = value
        parts = [torch.empty_like(padded) for _ in sizes] if self.writes else None
        dist.gather(padded, parts, dst=0, group=self._group.handle)
        if parts is None:
            return None
        whole = value.new_empty(self._shards.num_experts, *value.shape[1:])
        for rank, part in enumerate(parts):
            whole[list(self._shards.experts(rank, layer))] = part[: sizes[rank]]
        return whole

    def whole_state(self) -> dict[str, Tensor]:
        """The whole adapter under the keys ``save_adapter`` writes; every process must call it.

        Returns:
            Key -> fp32 tensor on the CPU where this process writes, else nothing.
        """
        state = {}
        for key, name, value in self._entries():
            whole = self.whole(name, value)
            if whole is not None:
                # one factor at a time: all experts' need not fit on a device
                state[key] = whole.to("cpu", copy=True)
        return state

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        """Key in a file, name, and this process's rows of every factor."""
        for name, layer in adapter_layers(self._model, self._adapter_name).items():
            slots = written_slots(layer, name, self._adapter_name, None)
            for entry in layer_entries(layer, self._adapter_name, slots):
                yield entry.slot.key, f"{name}.lora_{entry.slot.half}", entry.value
