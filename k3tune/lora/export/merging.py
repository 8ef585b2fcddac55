"""Why nothing is merged: what an adapter loses when its update is rounded into 4-bit experts.

The update is ``D = scale * B A``; merging stores ``Q(W + D)`` in place of W, both MXFP4. What
arrives is ``Q(W + D) - W``.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from k3tune.errors import AdapterError
from k3tune.lora.export.factors import AdapterSource, base_folder, open_source
from k3tune.lora.keys import FactorName
from k3tune.lora.read import FactorReader
from k3tune.published.safetensors_files import ShardReader, StoredTensor, read_header
from k3tune.published.tensor_table import TEXT_PREFIX
from k3tune.quant import dequantize, quantize

if TYPE_CHECKING:
    from peft import PeftModel

# Midpoints between neighbouring magnitudes of E2M1, and the magnitudes.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_GROUP = 32


class MergeLoss(NamedTuple):
    """What a re-quantised merge does to an adapter's update of the experts.

    Attributes:
        experts: matrices measured.
        total: matrices adapted.
        update: size of the update, relative L2 of the weights.
        error: relative L2 between what arrives and the update; 1 is no adapter at all.
        unchanged: share of weights that keep their 4-bit value.
        rule: how the scales were chosen, of three ways the one that loses least.
    """

    experts: int
    total: int
    update: float
    error: float
    unchanged: float
    rule: str

    def sentence(self) -> str:
        """The measurement in words."""
        return (
            f"measured on {self.experts} of its {self.total} expert matrices: the update is "
            f"{100 * self.update:.2g} % of the weights, and what arrives in MXFP4 is off by "
            f"{100 * self.error:.0f} % of the update ({100 * self.unchanged:.0f} % of the weights "
            f"keep their 4-bit value; scales: {self.rule}, the best of three rules)"
        )


def refuse_merge(source: str | Path, base: str | Path | None = None) -> AdapterError:
    """The error that says why an adapter is not merged, with the figure where the base is known."""
    reason = (
        "merging is refused: the routed experts are stored in 4 bits, and rounding W + scale * B A "
        "back to MXFP4 loses part of every update"
    )
    with FactorReader() as reader:
        adapter = open_source(source, base, reader)
        folder = base_folder(base, adapter.files)
        if folder is None:
            return AdapterError(f"{reason}; name the base (--base) to see how much of this one")
        loss = measure_merge(adapter, folder)
    if loss is None:
        return AdapterError(
            f"{reason}; this adapter leaves the experts alone, and k3tune writes no base at all: "
            "export it and serve it beside the base"
        )
    return AdapterError(f"{reason}; {loss.sentence()}. Export it and serve it beside the base")


def measure_merge(
    adapter: AdapterSource, base: Path, experts_a_module: int | None = 4
) -> MergeLoss | None:
    """Measure :class:`MergeLoss`, reading one expert's weight at a time.

    Args:
        adapter: with factors of experts.
        base: folder of the checkpoint.
        experts_a_module: how many experts of each projection, spread evenly; None is all.

    Returns:
        The loss; None if no expert is adapted.
    """
    owners = list(_sampled(adapter, experts_a_module))
    if not owners:
        return None
    weights = _ExpertWeights(base)
    sums: dict[str, list[float]] = {}
    for module, expert in owners:
        packed, scale = weights.read(FactorName(module, expert, "A").owner)
        weight = dequantize(packed, scale, dtype=torch.float32)
        update = _update(adapter, module, expert)
        for rule, merged in _merged(weight, update, scale):
            arrived = merged - weight
            total = sums.setdefault(rule, [0.0] * 5)
            total[0] += float((arrived - update).square().sum())
            total[1] += float(update.square().sum())
            total[2] += float(weight.square().sum())
            total[3] += int((arrived == 0).sum())
            total[4] += weight.numel()
    rule = min(sums, key=lambda name: sums[name][0])
    error, update_2, weight_2, unchanged, count = sums[rule]
    adapted = sum(len(f.adapted) for f in adapter.modules.values() if f.form is not None)
    return MergeLoss(
        experts=len(owners),
        total=adapted,
        update=math.sqrt(update_2 / weight_2),
        error=math.sqrt(error / update_2) if update_2 else 0.0,
        unchanged=unchanged / count,
        rule=rule,
    )


def merge_into(model: "PeftModel", adapter: AdapterSource) -> None:
    """Round the experts' updates into a loaded model's own copy of the base, to measure the loss.

    The experts' factors are set to zero, those of other modules stay: what then answers is a base
    whose experts were merged and re-quantised. The files of the base are not touched.

    Args:
        model: with the adapter loaded, all experts present.
        adapter: the same adapter's factors.
    """
    from k3tune.lora.inject import active_adapter, adapter_layers
    from k3tune.lora.layers import LoraPackedProjection

    name = active_adapter(model)
    for module, layer in adapter_layers(model, name).items():
        if not isinstance(layer, LoraPackedProjection):
            continue
        weight = layer.weight
        for expert in adapter.modules[module].adapted:
            assert expert is not None, f"{module=}"
            packed, scale = weight.packed[expert].cpu(), weight.scale[expert].cpu()
            before = dequantize(packed, scale, dtype=torch.float32)
            merged = _best(before, _update(adapter, module, expert), scale)
            encoded = quantize(merged, scale_rule="floor")
            after = dequantize(encoded.packed, encoded.scale, dtype=torch.float32)
            assert torch.equal(after, merged), f"{module=} {expert=}"
            weight.packed[expert], weight.scale[expert] = encoded.packed, encoded.scale
        layer.factor(name, "B").data.zero_()


def _best(weight: Tensor, update: Tensor, scale: Tensor) -> Tensor:
    """``Q(W + D)`` decoded, fp32 ``[O, I]``, by the rule that loses least of D."""
    candidates = [merged for _, merged in _merged(weight, update, scale)]
    return min(candidates, key=lambda merged: float((merged - weight - update).norm()))


def _sampled(adapter: AdapterSource, count: int | None) -> Iterator[tuple[str, int]]:
    for name, factors in adapter.modules.items():
        if factors.form is None:
            continue
        experts = [expert for expert in factors.adapted if expert is not None]
        step = 1 if count is None else max(1, len(experts) // count)
        for expert in experts[::step][:count]:
            yield name, expert


def _update(adapter: AdapterSource, module: str, expert: int) -> Tensor:
    A, B = (adapter.modules[module].halves[half].read(expert).float() for half in "AB")
    return adapter.scaling(module, expert) * (B @ A)


def _merged(weight: Tensor, update: Tensor, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Sum rounded to MXFP4 and decoded, for three choices of scales."""
    total = weight + update
    yield "the base's own", _on_scales(total, scale)
    encoded = quantize(total, scale_rule="floor")
    yield "floor rule", dequantize(encoded.packed, encoded.scale, dtype=torch.float32)
    encoded = quantize(total, scale_rule="ceil")
    yield "ceil rule", dequantize(encoded.packed, encoded.scale, dtype=torch.float32)


def _on_scales(total: Tensor, scale: Tensor) -> Tensor:
    step = torch.exp2(scale.float() - 127).repeat_interleave(_GROUP, dim=-1)
    magnitude = _MAGNITUDES[torch.bucketize((total / step).abs(), _MIDPOINTS)]
    return magnitude * total.sign() * step


class _ExpertWeights:
    """Packed weights of single experts, from a checkpoint's files."""

    def __init__(self, base: Path) -> None:
        self._files = sorted(base.glob("*.safetensors"))
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def read(self, owner: str) -> tuple[Tensor, Tensor]:
        """``packed`` and ``scale``, u8."""
        return self._tensor(f"{owner}.weight_packed"), self._tensor(f"{owner}.weight_scale")

    def _tensor(self, name: str) -> Tensor:
        name = f"{TEXT_PREFIX}{name}"
        # neighbours lie in one file: the header read last comes first, and is kept alone
        ordered = [*self._headers, *(file for file in self._files if file not in self._headers)]
        for file in ordered:
            header = self._headers.get(file) or read_header(file)
            if name in header:
                self._headers = {file: header}
                stored = header[name]
                tensor = torch.empty(stored.shape, dtype=torch.uint8)
                with ShardReader(file) as reader:
                    reader.read_into(name, stored.offset, tensor.flatten().numpy().data)
                return tensor
        raise AdapterError(f"{name} is in none of the base's files: is the adapter of this base?")
