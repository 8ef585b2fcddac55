"""LoRA on the frozen packed base: attach, train, save and load adapters through PEFT."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.lora.inject import adapter_parameters, attach_lora, disable_adapter
    from k3tune.lora.load import load_adapter
    from k3tune.lora.save import save_adapter
    from k3tune.lora.spec import LoraSpec
    from k3tune.lora.state import adapter_gradients, adapter_state

__all__ = [
    "LoraSpec",
    "adapter_gradients",
    "adapter_parameters",
    "adapter_state",
    "attach_lora",
    "disable_adapter",
    "load_adapter",
    "save_adapter",
]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "LoraSpec": "k3tune.lora.spec",
        "adapter_gradients": "k3tune.lora.state",
        "adapter_parameters": "k3tune.lora.inject",
        "adapter_state": "k3tune.lora.state",
        "attach_lora": "k3tune.lora.inject",
        "disable_adapter": "k3tune.lora.inject",
        "load_adapter": "k3tune.lora.load",
        "save_adapter": "k3tune.lora.save",
    },
)
