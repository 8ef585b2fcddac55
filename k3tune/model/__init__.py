"""Kimi K3's text model in plain single-device PyTorch, over frozen packed MXFP4 experts."""

from k3tune.model.checkpoint import load_base
from k3tune.model.configuration import K3Config
from k3tune.model.modeling import K3ForCausalLM

__all__ = ["K3Config", "K3ForCausalLM", "load_base"]
