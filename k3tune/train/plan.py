"""What a run would train and hold in memory, from the base's config alone: ``--dry_run``."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from trl import SFTConfig

from k3tune.arguments import LoraArguments, ModelArguments
from k3tune.lora import LoraSpec
from k3tune.lora.keys import parse_key
from k3tune.lora.read import read_adapter
from k3tune.lora.targets import adaptable_modules, choose_modules, group_of
from k3tune.model import K3ForCausalLM
from k3tune.model.checkpoint import model_config
from k3tune.model.latent_moe import PackedProjection
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.hub import resolve_checkpoint
from k3tune.published.tensor_table import text_tensors
from k3tune.train.options import check_training
from k3tune.train.run_config import RunConfig

_BYTES = {"U8": 1, "F32": 4}
_TRUNK_BYTES = {"bfloat16": 2, "float32": 4}
_FACTOR_BYTES = 4
# AdamW holds two moments beside the factors
_OPTIMIZER_BYTES = 8
_MOE_SCRATCH_BYTES = 64 << 20
# TRL's fused head works on tiles of so many tokens and so much of the vocabulary
_HEAD_TOKENS, _HEAD_VOCAB = 4096, 32768


def describe_run(
    model: ModelArguments, lora: LoraArguments, training: SFTConfig, own: Sequence[Any] = ()
) -> str:
    """Resolved config, trainable parameters by group and a memory estimate, for people.

    Args:
        model, lora, training: the run's options.
        own: all own dataclasses, for the config; default: ``model`` and ``lora``.

    Raises:
        ConfigError, AdapterError: if the run could not start with these options.
    """
    check_training(training)
    architecture = parse_config(read_config(resolve_checkpoint(model.base, weights=False)))
    counts = trainable_parameters(model, lora, training.seed)
    total = sum(counts.values())
    config = RunConfig.resolve(training, own or (model, lora))
    lines = ["# resolved config", config.text.rstrip(), "", "# trainable parameters (FP32)"]
    lines += [f"{name}: {count:,}" for name, count in counts.items()]
    lines += [f"total: {total:,}", "", "# memory of one process, computed, not measured"]
    memory = memory_bytes(architecture, model, training, total)
    lines += [f"{name}: {_readable(size)}" for name, size in memory.items()]
    lines.append(f"total: {_readable(sum(memory.values()))}")
    return "\n".join(lines)


def trainable_parameters(model: ModelArguments, lora: LoraArguments, seed: int) -> dict[str, int]:
    """Factors' elements by target group.

    Args:
        model: names the base, of which config.json alone is read.
        lora: what to adapt, or an adapter, of whose files the headers are read.
        seed: of the run.

    Raises:
        AdapterError: if a target matches nothing.
    """
    counts: Counter[str] = Counter()
    if lora.adapter is not None:
        for key, stored in read_adapter(lora.adapter).tensors.items():
            counts[group_of(_module_of(key))] += math.prod(stored.shape)
        return dict(counts)
    config = model_config(read_config(resolve_checkpoint(model.base, weights=False)))
    with torch.device("meta"):
        base = K3ForCausalLM(config)
    spec = LoraSpec(**lora.spec_fields(seed))
    modules = adaptable_modules(base)
    for name, size in choose_modules(spec, base).items():
        counts[group_of(name)] += _factor_elements(name, modules[name], size.rank, spec.form)
    return dict(counts)


def memory_bytes(
    architecture: Architecture, model: ModelArguments, training: SFTConfig, trainable: int
) -> dict[str, int]:
    """Estimate of what one process holds, by part.

    Left out: what the recomputation of one layer needs at its peak, communication buffers and
    the allocator's own losses.

    Args:
        architecture: of the base.
        model, training: the run's options; ZeRO's stage and the process count as launched.
        trainable: elements of all factors.
    """
    base: Counter[str] = Counter()
    for spec in text_tensors(architecture).values():
        elements = spec.least_length or math.prod(spec.shape)
        width = _BYTES.get(spec.dtype, _TRUNK_BYTES[model.dtype])
        base["experts, packed" if spec.dtype == "U8" else "trunk"] += elements * width
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    stage = training.deepspeed_plugin.zero_stage if training.deepspeed_plugin else 0
    tokens = training.per_device_train_batch_size * (training.max_length or 0)
    width = _TRUNK_BYTES[model.dtype]
    saved = architecture.num_hidden_layers * tokens * architecture.hidden_size * width
    head = min(tokens, _HEAD_TOKENS) * min(architecture.vocab_size, _HEAD_VOCAB) * width
    parts = {
        "base, experts packed": base["experts, packed"],
        "base, trunk": base["trunk"],
        "factors": trainable * _FACTOR_BYTES,
        "gradients": trainable * _FACTOR_BYTES // (processes if stage == 2 else 1),
        "optimizer (AdamW)": trainable * _OPTIMIZER_BYTES // (processes if stage else 1),
        "scratch of the experts' op": _MOE_SCRATCH_BYTES,
        "tile of logits": head,
    }
    if stage:
        parts["ZeRO's copy of the factors"] = trainable * _FACTOR_BYTES // processes
    name = (
        "inputs of checkpointed layers"
        if training.activation_checkpointing
        else ("activations, at least (activation_checkpointing is off)")
    )
    parts[f"{name}, {tokens:,} tokens"] = saved
    return parts


def _factor_elements(name: str, module: nn.Linear | PackedProjection, rank: int, form: str) -> int:
    inputs, outputs = module.in_features, module.out_features
    if not isinstance(module, PackedProjection):
        return rank * (inputs + outputs)
    rows_A = rows_B = module.num_experts
    if form == "shared_outer":
        # the latent's side: outputs of w2, inputs of w1 and w3
        if name.endswith(".w2"):
            rows_B = 1
        else:
            rows_A = 1
    return rank * (rows_A * inputs + rows_B * outputs)


def _module_of(key: str) -> str:
    parsed = parse_key(key)
    return key if parsed is None else parsed.module


def _readable(size: int) -> str:
    units: Mapping[str, float] = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    for unit, scale in units.items():
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"
