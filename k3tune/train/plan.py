"""What a run would train and hold in memory, from the base's config alone: ``--dry_run``."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from k3tune.arguments import LoraArguments, ModelArguments, ParallelArguments
from k3tune.lora.keys import parse_key
from k3tune.lora.modules import module_shapes
from k3tune.lora.plan import match_tensors
from k3tune.lora.read import read_adapter
from k3tune.lora.targets import group_of
from k3tune.parallel.expert_parallel import choose_shards
from k3tune.plan.adapter import AdapterSize, adapter_size
from k3tune.plan.layout import Layout, trunk_group
from k3tune.plan.memory import bytes_of_rank
from k3tune.plan.render import memory_lines
from k3tune.plan.sizes import base_bytes
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.hub import resolve_checkpoint
from k3tune.train.options import check_training
from k3tune.train.run_config import RunConfig

# Of a node, where no launcher says how many of its processes there are.
_PROCESSES_PER_NODE = 8


def describe_run(
    model: ModelArguments,
    lora: LoraArguments,
    training: SFTConfig,
    own: Sequence[Any] = (),
    parallel: ParallelArguments | None = None,
) -> str:
    """Resolved config, trainable parameters by group and a memory estimate, for people.

    Args:
        model, lora, training: the run's options.
        own: all own dataclasses, for the config; default: ``model`` and ``lora``.
        parallel: how the base is spread over processes; default: not at all.

    Raises:
        ConfigError, AdapterError: if the run could not start with these options.
    """
    check_training(training)
    return describe(model, lora, training, training.max_length or 0, own, parallel)


def describe(
    model: ModelArguments,
    lora: LoraArguments,
    training: TrainingArguments,
    row_tokens: int,
    own: Sequence[Any] = (),
    parallel: ParallelArguments | None = None,
) -> str:
    """As :func:`describe_run`, for checked options of any trainer.

    Args:
        model, lora, training, own, parallel: the run's options.
        row_tokens: the longest row of a batch.
    """
    architecture = parse_config(read_config(resolve_checkpoint(model.base, weights=False)))
    parallel = parallel or ParallelArguments()
    # refuses a placement that is not of this base and size
    choose_shards(architecture, parallel.expert_parallel_size, parallel.expert_placement)
    adapter = run_adapter(architecture, lora, training.seed)
    config = RunConfig.resolve(training, own or (model, lora), (parallel,))
    lines = ["# resolved config", config.text.rstrip(), "", "# trainable parameters (FP32)"]
    lines += [f"{name}: {count:,}" for name, count in adapter.by_group.items()]
    lines += [f"total: {adapter.total:,}", "", "# memory of one process, computed, not measured"]
    layout = run_layout(model, training, row_tokens, parallel)
    return "\n".join([*lines, *memory_lines(memory_bytes(architecture, adapter, training, layout))])


def run_adapter(architecture: Architecture, lora: LoraArguments, seed: int) -> AdapterSize:
    """Sizes of the adapter a run trains.

    Args:
        architecture: of the base.
        lora: what to adapt, or an adapter, of whose files the headers are read.
        seed: of the run.

    Raises:
        AdapterError: if a target matches nothing, or the adapter cannot be read or does not fit.
    """
    if lora.adapter is None:
        return adapter_size(architecture, lora.spec(seed))
    files = read_adapter(lora.adapter)
    # refuses one of another base
    match_tensors(files, module_shapes(architecture))
    by_group: Counter[str] = Counter()
    owned = shared = 0
    ranks: dict[str, int] = {}
    for key, stored in files.tensors.items():
        factor, numbers = parse_key(key), math.prod(stored.shape)
        module = key if factor is None else factor.module
        by_group[group_of(module)] += numbers
        stacked = len(stored.shape) == 3 and stored.shape[0] > 1
        if factor is not None and (factor.expert is not None or stacked):
            owned += numbers
        else:
            shared += numbers
        if factor is not None and factor.half == "A":
            ranks[module] = max(ranks.get(module, 0), stored.shape[-2])
    # an adapter may leave experts out: a rank's share is then counted as if it had them evenly
    each = -(-owned // architecture.num_experts)
    return AdapterSize(dict(by_group), each, shared, ranks)


def run_layout(
    model: ModelArguments,
    training: TrainingArguments,
    row_tokens: int,
    parallel: ParallelArguments,
) -> Layout:
    """How a run is spread, as launched: its processes and ZeRO's stage.

    Outside a launch, expert parallelism counts as many processes as it needs, under ZeRO-1.

    Args:
        model, training, parallel: the run's options.
        row_tokens: the longest row of a batch.

    Raises:
        ConfigError: if the processes cannot be split so.
    """
    size = parallel.expert_parallel_size
    group = int(parallel.trunk_shard) if parallel.trunk_shard.isdecimal() else 1
    processes = int(os.environ.get("WORLD_SIZE") or math.lcm(size, group))
    # as torchrun and accelerate say it, or DeepSpeed's launcher
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    per_node = int(said or min(processes, _PROCESSES_PER_NODE))
    plugin = training.deepspeed_plugin
    stage = plugin.zero_stage if plugin else 0
    return Layout(
        gpus=processes,
        gpus_per_node=per_node,
        expert_parallel_size=size,
        zero_stage=max(stage, 1) if size > 1 else stage,
        trunk_ranks=trunk_group(parallel.trunk_shard, processes, per_node),
        sequence_length=row_tokens,
        micro_batch=training.per_device_train_batch_size,
        activation_checkpointing=bool(training.activation_checkpointing),
        dtype=model.dtype,
    )


def memory_bytes(
    architecture: Architecture, adapter: AdapterSize, training: TrainingArguments, layout: Layout
) -> dict[str, int]:
    """Estimate of what one process holds at its peak, by part, and its ``total``.

    Args:
        architecture: of the base.
        adapter: what is trained.
        training: the run's options; with ``use_cpu`` the plain path is counted, else a GPU's.
        layout: from :func:`run_layout`.
    """
    base = base_bytes(architecture, layout.dtype)
    return bytes_of_rank(architecture, base, adapter, layout, fused=not training.use_cpu)
