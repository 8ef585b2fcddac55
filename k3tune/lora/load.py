"""Read an adapter directory into a model, whoever wrote it."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from k3tune.errors import AdapterError
from k3tune.lora.inject import (
    DEFAULT_ADAPTER,
    active_adapter,
    adapter_layers,
    base_of,
    inject,
    local_experts,
)
from k3tune.lora.layers import AdapterLayer, LoraPackedProjection
from k3tune.lora.modules import ModuleShape
from k3tune.lora.plan import HalfPlan, ModulePlan, disagreements, file_slots, match_tensors
from k3tune.lora.read import AdapterFiles, FactorReader, read_adapter
from k3tune.lora.save import experts_form
from k3tune.lora.targets import RankAlpha, adaptable_modules
from k3tune.model.latent_moe import PackedProjection
from k3tune.model.modeling import K3ForCausalLM

logger = logging.getLogger(__name__)


def load_adapter(
    model: K3ForCausalLM | PeftModel,
    path: str | Path,
    *,
    trainable: bool = False,
    adapter_name: str = DEFAULT_ADAPTER,
) -> PeftModel:
    """Load an adapter: k3tune's own directories, and PEFT's of others.

    Keys may have ``base_model.model.`` and ``language_model.`` or not; experts' factors may be
    stacked ``[E or 1, r, in]``, shared 2-D, or 2-D an expert. The tensors decide which modules are
    adapted, with which rank and form; alpha comes from the config, and the scale is alpha / (the
    tensors' rank), or over its root with rsLoRA. Where the config's ``r``, ``rank_pattern`` or
    ``target_modules`` disagree with the tensors, or an expert has no factors, a warning is logged.
    A base with some of the experts takes those rows only. ``PeftModel.from_pretrained`` is not
    supported: it knows neither the published prefix nor the experts' layers.

    Args:
        model: from :func:`k3tune.load_base`, changed in place, or the PeftModel over it.
        path: adapter directory.
        trainable: leave the factors trainable; otherwise nothing requires a gradient.
        adapter_name: PEFT's name of the adapter. A second one is added inactive, as PEFT does it.

    Returns:
        The adapted model.

    Raises:
        AdapterError: if keys match nothing, factors are missing, their shapes do not fit or they
            are not finite, the config asks for more than plain LoRA, or the name is taken.
        CheckpointError: if a file is damaged.
    """
    base = base_of(model)
    files = read_adapter(path)
    modules = _shapes(base)
    plans = match_tensors(files, modules)
    for sentence in disagreements(files, plans, modules):
        logger.warning("%s: %s", files.folder, sentence)
    peft_model = inject(
        model,
        {name: plan.size for name, plan in plans.items()},
        adapter_name,
        use_rslora=files.config.use_rslora,
        dropout=files.config.lora_dropout,
        init="kaiming",
        trainable=trainable,
    )
    try:
        _fill_all(peft_model, base, adapter_name, plans)
    except BaseException:
        # a value that is not finite is found only now: the model is left as it was
        peft_model.delete_adapter(adapter_name)
        if not isinstance(model, PeftModel):
            peft_model.unload()
        raise
    layers = adapter_layers(peft_model, adapter_name)
    _report(files, experts_form(layers, adapter_name), trainable)
    logger.info("%s: loaded %d tensors into %d modules", path, len(files.tensors), len(plans))
    return peft_model


def read_factors(
    model: PeftModel, path: str | Path, adapter_name: str | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values a directory has for an adapter the model has; the model stays as it is.

    Args:
        model: with an adapter.
        path: adapter directory with the same modules, ranks, alphas and form.
        adapter_name: None is the active one.

    Returns:
        Module -> its A and B, FP32 on the CPU, of the shapes the model holds.

    Raises:
        AdapterError: if the directory is no adapter of this base, or differs from the model's.
        CheckpointError: if a file is damaged.
    """
    base, adapter_name = base_of(model), active_adapter(model, adapter_name)
    files = read_adapter(path)
    plans = match_tensors(files, _shapes(base))
    layers = adapter_layers(model, adapter_name)
    if plans.keys() != layers.keys():
        other = sorted(plans.keys() ^ layers.keys())
        raise AdapterError(
            f"{path} adapts {len(plans)} modules and the model's adapter {len(layers)}, expected "
            f"the same ones: {', '.join(other[:3])} is in one of them only"
        )
    factors = {}
    with FactorReader() as reader:
        for name, layer in layers.items():
            plan, rows = plans[name], _rows(layer, base, name)
            said, held = _scales(layer, adapter_name, plan, rows)
            rslora = files.config.use_rslora, layer.use_rslora[adapter_name]
            if said != held or rslora[0] != rslora[1]:
                raise AdapterError(
                    f"{path}: {name} has rank and alpha {said[0]} (rsLoRA {rslora[0]}), expected "
                    f"{held[0]} (rsLoRA {rslora[1]}) as the model's adapter"
                )
            A, B = (
                _read_half(reader, half, plan.halves[half], plan.size.rank, rows) for half in "AB"
            )
            for half, value in (("A", A), ("B", B)):
                shape = layer.factor(adapter_name, half).shape
                if value.shape != shape:
                    raise AdapterError(
                        f"{path}: {name}.lora_{half} is {list(value.shape)}, expected "
                        f"{list(shape)} as the model's adapter: save it in the same form"
                    )
            factors[name] = A, B
    return factors


def _scales(
    layer: AdapterLayer, adapter_name: str, plan: ModulePlan, rows: Mapping[int, int]
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Rank and alpha of each of a layer's rows: in a directory, and in the model."""
    count = max(len(rows), 1)
    found = [plan.size] * count
    if plan.experts:
        found = [plan.experts.get(expert, RankAlpha(0, 0)) for expert in rows]
    held = [(layer.r[adapter_name], layer.lora_alpha[adapter_name])] * count
    if isinstance(layer, LoraPackedProjection) and adapter_name in layer.expert_ranks:
        ranks, alphas = layer.expert_ranks[adapter_name], layer.expert_alphas[adapter_name]
        held = [(r, a if r else 0) for r, a in zip(ranks, alphas, strict=True)]
    return [(size.rank, size.alpha) for size in found], held


def _report(files: AdapterFiles, form: str | None, trainable: bool) -> None:
    said = (files.metadata or {}).get("form", form)
    if said != form:
        logger.warning(
            "%s: k3tune.json says the experts' form is %s, the tensors are %s and decide",
            files.folder,
            said,
            form,
        )
    if trainable and form and files.config.lora_dropout:
        logger.warning(
            "%s: lora_dropout %g applies to linear modules only: the experts' op has none",
            files.folder,
            files.config.lora_dropout,
        )


def _shapes(base: K3ForCausalLM) -> dict[str, ModuleShape]:
    """The base's modules, counting all experts where a process holds some."""
    num_experts = base.model.architecture.num_experts
    return {
        name: ModuleShape(
            module.in_features,
            module.out_features,
            num_experts if isinstance(module, PackedProjection) else None,
        )
        for name, module in adaptable_modules(base).items()
    }


def _rows(layer: AdapterLayer, base: K3ForCausalLM, name: str) -> dict[int, int]:
    """Row of each local expert by its global id; empty for a linear module."""
    if not isinstance(layer, LoraPackedProjection):
        return {}
    ids = local_experts(base, name)
    return {e: row for row, e in enumerate(range(layer.num_experts) if ids is None else ids)}


def _fill_all(
    model: PeftModel, base: K3ForCausalLM, adapter_name: str, plans: Mapping[str, ModulePlan]
) -> None:
    with FactorReader() as reader:
        for name, layer in adapter_layers(model, adapter_name).items():
            _fill(reader, layer, adapter_name, plans[name], _rows(layer, base, name))


def _fill(
    reader: FactorReader,
    layer: AdapterLayer,
    adapter_name: str,
    plan: ModulePlan,
    rows: Mapping[int, int],
) -> None:
    """Read a module's factors, and set them with what describes them."""
    A, B = (_read_half(reader, half, plan.halves[half], plan.size.rank, rows) for half in "AB")
    layer.set_factors(adapter_name, A, B)
    packed = isinstance(layer, LoraPackedProjection)
    layer.slots[adapter_name] = file_slots(plan, packed, rows)
    if not isinstance(layer, LoraPackedProjection):
        return
    layer.shared[adapter_name] = "".join(
        half for half, tensors in plan.halves.items() if _is_shared(tensors)
    )
    if plan.experts:
        sizes = [plan.experts.get(expert) for expert in rows]
        layer.describe_experts(
            adapter_name,
            [size.rank if size else 0 for size in sizes],
            [size.alpha if size else plan.size.alpha for size in sizes],
        )


def _read_half(
    reader: FactorReader, half: str, plan: HalfPlan, rank: int, rows: Mapping[int, int]
) -> Tensor:
    """A module's A or B, the local experts' rows of it, fp32 on the CPU."""
    if plan.whole is not None:
        key, stored = plan.whole
        if rows and len(stored.shape) == 2:
            return reader.read(key, stored)[None]
        return reader.read(key, stored, list(rows) if rows and stored.shape[0] > 1 else None)
    _, first = next(iter(plan.experts.values()))
    shape = (rank, first.shape[1]) if half == "A" else (first.shape[0], rank)
    stacked = torch.zeros(len(rows), *shape)
    for expert, (key, stored) in plan.experts.items():
        if expert in rows:
            value = reader.read(key, stored)
            stacked[rows[expert], : value.shape[0], : value.shape[1]] = value
    return stacked


def _is_shared(plan: HalfPlan) -> bool:
    if plan.whole is None:
        return False
    shape = plan.whole[1].shape
    return len(shape) == 2 or shape[0] == 1
