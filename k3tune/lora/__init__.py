"""LoRA on the frozen packed base: attach, train, save, load, export and verify adapters."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.lora.export.exporting import export_adapter
    from k3tune.lora.export.importing import import_adapter
    from k3tune.lora.export.verifying import verify
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
    "export_adapter",
    "import_adapter",
    "load_adapter",
    "save_adapter",
    "verify",
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
        "export_adapter": "k3tune.lora.export.exporting",
        "import_adapter": "k3tune.lora.export.importing",
        "load_adapter": "k3tune.lora.load",
        "save_adapter": "k3tune.lora.save",
        "verify": "k3tune.lora.export.verifying",
    },
)
