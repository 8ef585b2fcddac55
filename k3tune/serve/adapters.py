"""The base with several adapters, of which a forward applies one or none."""

import threading
from pathlib import Path
from typing import Any

from k3tune.lora.layers import AdapterLayer
from k3tune.lora.load import load_adapter
from k3tune.model.modeling import K3ForCausalLM

# While PEFT builds layers, modules that any thread of the process builds are on the meta device.
_BUILDING = threading.Lock()


class AdaptedModel:
    """A base and its adapters by key; used by one thread.

    Args:
        base: in eval mode, changed in place when the first adapter comes.
    """

    def __init__(self, base: K3ForCausalLM) -> None:
        self.base = base
        # PEFT's model over the base; None without adapters
        self._peft: Any = None
        self._layers: list[AdapterLayer] = []
        self._keys: set[str] = set()

    def __contains__(self, key: str | None) -> bool:
        """Whether there is such an adapter; None, the base, is always there."""
        return key is None or key in self._keys

    def load(self, key: str, folder: Path) -> None:
        """Read an adapter's directory.

        Args:
            key: without dots, not used before.
            folder: in any form :func:`k3tune.lora.load_adapter` reads.

        Raises:
            AdapterError, CheckpointError: if it does not fit the base or is damaged.
        """
        with _BUILDING:
            self._peft = load_adapter(self._peft or self.base, folder, adapter_name=key)
        self._keys.add(key)
        self._find_layers()

    def unload(self, key: str) -> None:
        """Forget an adapter; one that is not there is forgotten already."""
        if key not in self._keys:
            return
        self._keys.remove(key)
        if self._keys:
            # PEFT warns when it has to choose the next active one itself
            self._peft.set_adapter(min(self._keys), inference_mode=True)
            self._peft.delete_adapter(key)
        else:
            # PEFT cannot be left without any: the base is taken out again
            self._peft.unload()
            self._peft = None
        self._find_layers()

    def activate(self, key: str | None) -> None:
        """Make the next forwards apply an adapter, or none."""
        assert key in self, f"{key=}"
        for layer in self._layers:
            layer.enable_adapters(key is not None)
            if key is not None and layer.active_adapters != [key]:
                layer.set_adapter([key], inference_mode=True)

    def _find_layers(self) -> None:
        self._layers = [m for m in self.base.modules() if isinstance(m, AdapterLayer)]
