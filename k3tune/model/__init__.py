"""Kimi K3's text model in plain single-device PyTorch, over frozen packed MXFP4 experts."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.model.checkpoint import load_base
    from k3tune.model.configuration import K3Config
    from k3tune.model.modeling import K3ForCausalLM

__all__ = ["K3Config", "K3ForCausalLM", "load_base"]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "K3Config": "k3tune.model.configuration",
        "K3ForCausalLM": "k3tune.model.modeling",
        "load_base": "k3tune.model.checkpoint",
    },
)
