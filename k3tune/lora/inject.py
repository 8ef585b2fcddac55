"""The door to PEFT: wrap a base's modules, find the wrapped ones again, attach a new adapter."""

import hashlib
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from k3tune.errors import AdapterError
from k3tune.lora.layers import AdapterLayer, LoraLinear, LoraPackedProjection, fill_A
from k3tune.lora.spec import LoraSpec, dropout_message
from k3tune.lora.targets import (
    RankAlpha,
    adaptable_modules,
    choose_modules,
    config_fields,
    group_of,
)
from k3tune.model.latent_moe import PackedProjection, RoutedExperts
from k3tune.model.modeling import K3ForCausalLM

logger = logging.getLogger(__name__)

DEFAULT_ADAPTER = "default"
# The projections whose A lies on the latent's side; w2's other side does.
_SHARED_HALF = {"w1": "A", "w3": "A", "w2": "B"}


def attach_lora(
    model: K3ForCausalLM | PeftModel, spec: LoraSpec, *, adapter_name: str = DEFAULT_ADAPTER
) -> PeftModel:
    """Attach a new, trainable adapter; with B = 0 the model still answers as the base does.

    Nothing but the adapter's FP32 factors requires a gradient afterwards. A second adapter of a
    :class:`PeftModel` is added as PEFT does it: inactive until ``set_adapter``.

    Args:
        model: from :func:`k3tune.load_base`, changed in place, or the PeftModel over it.
        spec: what to adapt.
        adapter_name: PEFT's name of the adapter.

    Raises:
        AdapterError: if a target or pattern matches nothing, experts are targeted and the base
            holds only some of them outside expert parallelism, experts and dropout come together,
            or the name is taken.
    """
    base = base_of(model)
    chosen = choose_modules(spec, base)
    modules = adaptable_modules(base)
    experts = [name for name in chosen if isinstance(modules[name], PackedProjection)]
    if experts:
        _check_experts_are_there(base)
        if spec.dropout:
            raise AdapterError(dropout_message(spec.dropout, f"targets match {experts[0]}"))
    peft_model = inject(
        model,
        chosen,
        adapter_name,
        use_rslora=spec.use_rslora,
        dropout=spec.dropout,
        init=spec.init,
        trainable=True,
    )
    count = 0
    for name, layer in adapter_layers(peft_model, adapter_name).items():
        if isinstance(layer, LoraPackedProjection) and spec.form == "shared_outer":
            layer.shared[adapter_name] = _SHARED_HALF[name.rpartition(".")[2]]
        A, B = _initial_factors(layer, name, adapter_name, spec, local_experts(base, name))
        layer.set_factors(adapter_name, A, B)
        count += A.numel() + B.numel()
    logger.info(
        "adapter %s: %d modules in %d target groups, %d trainable parameters",
        adapter_name,
        len(chosen),
        len({group_of(name) for name in chosen}),
        count,
    )
    return peft_model


def inject(
    model: K3ForCausalLM | PeftModel,
    chosen: Mapping[str, RankAlpha],
    adapter_name: str,
    *,
    use_rslora: bool,
    dropout: float,
    init: str,
    trainable: bool,
) -> PeftModel:
    """Let PEFT wrap the chosen modules; their factors are on the meta device until set.

    Raises:
        AdapterError: if the model has an adapter of this name, or PEFT layers without PeftModel.
    """
    base = base_of(model)
    if isinstance(model, PeftModel) and adapter_name in model.peft_config:
        raise AdapterError(
            f"the model has an adapter {adapter_name!r} already: choose another adapter_name, or "
            "model.delete_adapter() first"
        )
    if not adapter_name or "." in adapter_name:
        raise AdapterError(f"adapter_name is {adapter_name!r}, expected a name without dots")
    if base is model and any(isinstance(module, AdapterLayer) for module in base.modules()):
        raise AdapterError(
            "the base is wrapped by a PeftModel already: pass that PeftModel to add an adapter, or "
            "take the adapters off with its unload()"
        )
    # No task_type: PEFT's wrapper for causal models adds arguments (output_attentions, ...) that
    # K3's forward does not have; the plain one hands on what it gets.
    config = LoraConfig(
        lora_dropout=dropout,
        use_rslora=use_rslora,
        init_lora_weights="gaussian" if init == "gaussian" else True,
        inference_mode=not trainable,
        **config_fields(chosen, adaptable_modules(base)),
    )
    config._register_custom_module({nn.Linear: LoraLinear, PackedProjection: LoraPackedProjection})
    if isinstance(model, PeftModel):
        model.add_adapter(adapter_name, config, low_cpu_mem_usage=True)
    else:
        model = get_peft_model(base, config, adapter_name, low_cpu_mem_usage=True)
    # new modules start in training mode, whatever the base is in
    model.train(base.training)
    wrapped = adapter_layers(model, adapter_name).keys()
    assert wrapped == chosen.keys(), f"{wrapped ^ chosen.keys()=}"
    return model


def base_of(model: nn.Module) -> K3ForCausalLM:
    """The K3 model an adapter goes to.

    Raises:
        AdapterError: if ``model`` is neither a K3 model nor a PeftModel over one.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, K3ForCausalLM):
        raise AdapterError(
            f"expected a K3ForCausalLM (k3tune.load_base) or the PeftModel over one, found a "
            f"{type(base).__name__}"
        )
    return base


def adapter_layers(model: nn.Module, adapter_name: str) -> dict[str, AdapterLayer]:
    """The layers that hold an adapter, by their names in the base, in the model's order.

    Raises:
        AdapterError: if PEFT wrapped a module with a layer of its own.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = {}
    for name, module in base.named_modules():
        if isinstance(module, AdapterLayer):
            if adapter_name in module.lora_A:
                layers[name] = module
        elif isinstance(module, BaseTunerLayer):
            raise AdapterError(
                f"{name} is wrapped by PEFT's own {type(module).__name__}, expected k3tune's "
                "layers: make adapters with attach_lora or load_adapter, not from a LoraConfig"
            )
    return layers


def active_adapter(model: nn.Module, adapter_name: str | None = None) -> str:
    """Check an adapter's name; None is the active one.

    Raises:
        AdapterError: if the model has no adapter, or none of this name.
    """
    if not isinstance(model, PeftModel) or not model.peft_config:
        raise AdapterError(
            f"expected a model with an adapter, found a {type(model).__name__} without: use "
            "attach_lora or load_adapter"
        )
    if adapter_name is None:
        if not model.active_adapters:
            raise AdapterError(
                f"no adapter is active, expected one of {', '.join(model.peft_config)}: call "
                "set_adapter or pass adapter_name"
            )
        return model.active_adapters[0]
    if adapter_name not in model.peft_config:
        raise AdapterError(
            f"the model has no adapter {adapter_name!r}, it has {', '.join(model.peft_config)}"
        )
    return adapter_name


def adapter_parameters(
    model: PeftModel, adapter_name: str | None = None
) -> dict[str, dict[str, nn.Parameter]]:
    """An adapter's factors by target group and name, for an optimizer's groups and for logs.

    Args:
        model: with an adapter.
        adapter_name: None is the active one.

    Returns:
        Group name (``"other"`` for patterns outside the groups) -> ``"<module>.lora_A"`` or
        ``"<module>.lora_B"`` -> FP32 parameter; groups in the order of the model.
    """
    adapter_name = active_adapter(model, adapter_name)
    groups: dict[str, dict[str, nn.Parameter]] = {}
    for name, layer in adapter_layers(model, adapter_name).items():
        group = groups.setdefault(group_of(name), {})
        for half in "AB":
            group[f"{name}.lora_{half}"] = layer.factor(adapter_name, half)
    return groups


def disable_adapter(model: PeftModel) -> AbstractContextManager[None]:
    """A context in which ``model`` is the base, bit for bit.

    Raises:
        AdapterError: if the model has no adapter.
    """
    active_adapter(model)
    return model.disable_adapter()


def local_experts(base: nn.Module, name: str) -> list[int] | None:
    """Global ids of the experts in a packed projection's rows; None is all in order, or none."""
    parent = base.get_submodule(name.rpartition(".")[0])
    if not isinstance(parent, RoutedExperts) or parent.local_experts is None:
        return None
    ids = parent.local_experts.tolist()
    return None if ids == list(range(base_of(base).model.architecture.num_experts)) else ids


def _check_experts_are_there(base: K3ForCausalLM) -> None:
    """Tokens of absent experts get nothing: right only where another process adds their part."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            return
    total = base.model.architecture.num_experts
    for name, module in base.named_modules():
        if isinstance(module, RoutedExperts) and module.w1.num_experts < total:
            raise AdapterError(
                f"targets include experts, but the base was loaded with {module.w1.num_experts} of "
                f"{total} experts a layer (first at {name}): load it with experts=None, start all "
                "processes of an expert-parallel run, or leave the experts out of the targets"
            )


def _initial_factors(
    layer: AdapterLayer, name: str, adapter_name: str, spec: LoraSpec, experts: list[int] | None
) -> tuple[Tensor, Tensor]:
    """A drawn, B zero, on the CPU: the same numbers whatever device the base is on."""
    rank, shared, owners = layer.r[adapter_name], "", [name]
    if isinstance(layer, LoraPackedProjection):
        shared = layer.shared.get(adapter_name, "")
        ids = range(layer.num_experts) if experts is None else experts
        owners = [f"{name}.{i}" for i in (["shared"] if "A" in shared else ids)]
    A = torch.empty(layer.factor_shape("A", rank, shared="A" in shared))
    for row, owner in zip(A.view(len(owners), rank, -1), owners, strict=True):
        fill_A(row, spec.init, rank, _generator(spec.seed, owner))
    return A, torch.zeros(layer.factor_shape("B", rank, shared="B" in shared))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
