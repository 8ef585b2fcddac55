"""The second half of a verification: the model answers alike with the exported and the trained."""

from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor

from k3tune.lora.export.served import ServedAdapter, ServedModule
from k3tune.lora.inject import DEFAULT_ADAPTER, adapter_layers, inject
from k3tune.lora.layers import AdapterLayer, LoraPackedProjection
from k3tune.lora.load import load_adapter
from k3tune.lora.targets import RankAlpha
from k3tune.model.modeling import K3ForCausalLM

_ROWS, _LENGTH = 2, 24


class ForwardFigures(NamedTuple):
    """Relative L2 of logits on probe tokens.

    ``effect``: what the trained adapter changes, of the base's logits. ``gap``: how far the
    exported is from the trained, of what the trained changes.
    """

    effect: float
    gap: float


def compare_forward(
    base: K3ForCausalLM,
    served: ServedAdapter,
    trained: Path,
    dropped: set[str],
) -> ForwardFigures:
    """Run base, trained and exported adapter on the same tokens; the base is left as it was.

    Args:
        base: without adapters.
        served: the exported adapter as an engine reads it.
        trained: directory of the trained adapter.
        dropped: modules the export left out, which the trained one is run without.
    """
    ids = probe_ids(base.model.architecture.vocab_size).to(base.model.embed_tokens.weight.device)
    plain = _logits(base, ids)
    model = load_adapter(base, trained)
    _silence(model, dropped)
    expected = _logits(model, ids)
    model.unload()
    actual = _logits(load_served(base, served), ids)
    effect = (expected - plain).norm()
    gap = float((actual - expected).norm() / effect) if effect else float((actual - plain).norm())
    return ForwardFigures(float(effect / plain.norm()), gap)


def probe_ids(vocab_size: int) -> Tensor:
    """Tokens from all over the vocabulary, the same every time; ``[2, 24]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (_ROWS, _LENGTH), generator=generator)


def load_served(base: K3ForCausalLM, served: ServedAdapter) -> PeftModel:
    """Put factors as an engine reads them into k3tune's layers, expert by expert."""
    sizes = {name: RankAlpha(_rank(module), 1.0) for name, module in served.modules.items()}
    model = inject(
        base,
        sizes,
        DEFAULT_ADAPTER,
        use_rslora=False,
        dropout=0.0,
        init="kaiming",
        trainable=False,
    )
    for name, layer in adapter_layers(model, DEFAULT_ADAPTER).items():
        _fill(layer, served.modules[name])
    return model


def _rank(module: ServedModule) -> int:
    return len(module.read(None if module.num_experts is None else 0).A)


def _fill(layer: AdapterLayer, module: ServedModule) -> None:
    if not isinstance(layer, LoraPackedProjection):
        A, B, scale = module.read(None)
        layer.set_factors(DEFAULT_ADAPTER, A.float(), B.float())
        layer.scaling[DEFAULT_ADAPTER] = scale
        return
    updates = [module.read(expert) for expert in range(module.num_experts or 0)]
    rank = max(len(update.A) for update in updates)
    A_ERI = torch.zeros(len(updates), rank, updates[0].A.shape[1])
    B_EOR = torch.zeros(len(updates), updates[0].B.shape[0], rank)
    for row, update in enumerate(updates):
        A_ERI[row, : len(update.A)] = update.A
        B_EOR[row, :, : len(update.A)] = update.B
    layer.set_factors(DEFAULT_ADAPTER, A_ERI, B_EOR)
    layer.expert_scaling[DEFAULT_ADAPTER] = torch.tensor(
        [update.scale for update in updates], device=layer.base_device
    )


def _silence(model: PeftModel, modules: set[str]) -> None:
    for name, layer in adapter_layers(model, DEFAULT_ADAPTER).items():
        if name in modules:
            layer.factor(DEFAULT_ADAPTER, "B").data.zero_()


def _logits(model: K3ForCausalLM | PeftModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.double()
