"""A second, frozen set of an adapter's values, for sampling while the first set trains.

It holds tensors only: modules, parameter names and optimizers know one adapter.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from k3tune.errors import AdapterError
from k3tune.lora.inject import active_adapter, adapter_layers
from k3tune.lora.load import read_factors
from k3tune.lora.state import slots_of

_SHOWN = 3


class Loaded(NamedTuple):
    """What :meth:`FrozenFactors.load` did: entries given, and those that changed a value here."""

    num_tensors: int
    num_changed: int


class FrozenFactors:
    """Values of an adapter's factors that only apply inside :meth:`applied`.

    They start as the adapter with B = 0: the base.

    Args:
        model: PeftModel with the adapter.
        adapter_name: None is the active one.
        dtype: round every value to this dtype; they are FP32 all the same. None keeps them.

    Raises:
        AdapterError: if there is no such adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter_name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._adapter_name = active_adapter(model, adapter_name)
        assert isinstance(model, PeftModel), f"{type(model)=} has an adapter"
        self._model = model
        self._dtype = dtype
        self._values: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in adapter_layers(model, self._adapter_name).items():
            A, B = (layer.factor(self._adapter_name, half).detach() for half in "AB")
            self._values[name] = self._rounded(A).clone(), torch.zeros_like(B)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model applies these values, whichever adapter is active."""
        layers = adapter_layers(self._model, self._adapter_name)
        with ExitStack() as stack:
            for name, (A, B) in self._values.items():
                stack.enter_context(layers[name].standing_in(self._adapter_name, A, B))
            yield

    def load(self, source: Path | Mapping[str, Tensor]) -> Loaded:
        """Replace all values; nothing is replaced if a part of the source does not fit.

        Args:
            source: an adapter directory, or tensors under the keys of
                :func:`k3tune.lora.adapter_state`.

        Raises:
            AdapterError: if the source lacks an entry, has one too many, or one of another shape or
                with a value that is not finite.
            CheckpointError: if a file is damaged.
        """
        pairs = self._pairs_of(source) if isinstance(source, Mapping) else self._read(source)
        num_changed = 0
        for target, value in pairs:
            value = self._rounded(value.detach().to(target.device, torch.float32))
            num_changed += not torch.equal(target, value)
            target.copy_(value)
        return Loaded(len(pairs), num_changed)

    def _pairs_of(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each value held, as a file's entry, with the one given for it."""
        held: dict[str, Tensor] = {}
        for name, slots in slots_of(self._model, self._adapter_name).items():
            A, B = self._values[name]
            held |= {slot.key: slot.part(A if slot.half == "A" else B) for slot in slots}
        if held.keys() != tensors.keys():
            missing, unknown = (
                sorted(held.keys() - tensors.keys()),
                sorted(tensors.keys() - held.keys()),
            )
            raise AdapterError(
                f"expected the adapter's {len(held)} tensors, {len(missing)} are missing "
                f"({', '.join(missing[:_SHOWN]) or 'none'}) and {len(unknown)} unknown "
                f"({', '.join(unknown[:_SHOWN]) or 'none'}): pass what adapter_state returns"
            )
        for key, value in held.items():
            given = tensors[key]
            if given.shape != value.shape:
                raise AdapterError(
                    f"{key} is {list(given.shape)}, expected {list(value.shape)} as the adapter"
                )
            if not torch.isfinite(given).all():
                raise AdapterError(f"{key} holds values that are not finite: training diverged")
        return [(value, tensors[key]) for key, value in held.items()]

    def _read(self, path: Path) -> list[tuple[Tensor, Tensor]]:
        read = read_factors(self._model, path, self._adapter_name)
        return [
            pair
            for name, values in self._values.items()
            for pair in zip(values, read[name], strict=True)
        ]

    def _rounded(self, value: Tensor) -> Tensor:
        return value if self._dtype is None else value.to(self._dtype).to(value.dtype)
