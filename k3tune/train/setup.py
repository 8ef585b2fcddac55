"""From options to what a trainer takes: the adapted model, the tokenizer, the datasets."""

import logging
from functools import partial
from random import Random

import datasets
import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import IntervalStrategy, TrainingArguments
from trl import SFTConfig

from k3tune.arguments import DataArguments, LoraArguments, ModelArguments, ParallelArguments
from k3tune.data import K3Tokenizer, loading, pack
from k3tune.data.sources import SampleOptions, load_samples
from k3tune.errors import ConfigError
from k3tune.lora import attach_lora, load_adapter
from k3tune.model import load_base
from k3tune.parallel.dispatch import DispatchOptions
from k3tune.parallel.expert_parallel import ExpertParallel, check_zero, choose_shards
from k3tune.parallel.groups import check_world
from k3tune.parallel.trunk_loading import load_sharded_base, trunk_group
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.hub import resolve_checkpoint
from k3tune.train.options import check_training

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(
    model: ModelArguments,
    lora: LoraArguments,
    training: TrainingArguments,
    parallel: ParallelArguments | None = None,
) -> nn.Module:
    """Load the frozen base, or this process's part of it, and attach the adapter to train.

    Raises:
        ConfigError, CheckpointError, AdapterError: if base or adapter cannot be had as asked.
    """
    parallel = parallel or ParallelArguments()
    architecture = _architecture(model)
    experts = start_expert_parallel(architecture, training, parallel)
    group = start_trunk_shards(training, parallel)
    load = load_base if group is None else partial(load_sharded_base, group=group)
    base = load(
        model.base,
        dtype=DTYPES[model.dtype],
        device=training.device,
        kernels=model.kernels,
        experts=None if experts is None else experts.experts(architecture.moe_layers),
    )
    if lora.adapter is not None:
        logger.warning("going on with the adapter %s: lora_* options are not used", lora.adapter)
        adapted = load_adapter(base, lora.adapter, trainable=True)
    else:
        adapted = attach_lora(base, lora.spec(training.seed))
    if experts is not None:
        experts.attach(adapted)
    return adapted


def start_expert_parallel(
    architecture: Architecture, training: TrainingArguments, options: ParallelArguments
) -> ExpertParallel | None:
    """Make the groups of processes that share experts; None for a run without.

    Raises:
        ConfigError: if this launch cannot be expert parallel so.
    """
    size = options.expert_parallel_size
    if size == 1:
        return None
    check_world(size)
    plugin = training.deepspeed_plugin
    if plugin is None:
        raise ConfigError(
            f"expert_parallel_size is {size} and this launch does not use DeepSpeed, expected it: "
            "plain DDP would average the gradients of different experts; launch with accelerate "
            "and a config file of distributed_type DEEPSPEED"
        )
    check_zero(plugin.zero_stage, size)
    shards = choose_shards(architecture, size, options.expert_placement)
    travel = DispatchOptions(deduplicate=options.deduplicate_dispatch, mxfp8=options.mxfp8_dispatch)
    return ExpertParallel(shards, travel)


def start_trunk_shards(
    training: TrainingArguments, options: ParallelArguments
) -> ProcessGroup | None:
    """Make the group of processes over which the trunk is spread; None where each has it whole.

    Raises:
        ConfigError: if this launch has no such groups, or the run would keep all it gathers.
    """
    group = trunk_group(options.trunk_shard)
    if group is None:
        if options.trunk_shard != "none":
            logger.warning(
                "trunk_shard is %s, which is this process alone: the trunk stays whole",
                options.trunk_shard,
            )
        return None
    if not training.activation_checkpointing:
        raise ConfigError(
            f"trunk_shard is {options.trunk_shard} and activation_checkpointing is off, expected "
            "on: autograd would hold the gathered weights of every layer until its backward, more "
            "than a whole trunk"
        )
    return group


def load_tokenizer(model: ModelArguments) -> K3Tokenizer:
    """The base's tokenizer.

    Raises:
        ConfigError: if its files are not there, or it has ids the base does not have.
        CheckpointError: if they do not make one.
    """
    vocab_size = _architecture(model).vocab_size
    otherwise = "name their folder with tokenizer"
    return loading.load_tokenizer(model.tokenizer_path, vocab_size, otherwise)


def build_datasets(
    data: DataArguments, tokenizer: K3Tokenizer, training: SFTConfig
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Tokenised samples, packed with ``packing``, and those for evaluation if there are any.

    Raises:
        ConfigError: if data and ``eval_strategy`` do not go together, or no sample would be left.
        DataError: if a source cannot be read or has bad samples that were not to be skipped.
    """
    check_training(training)
    strategy = IntervalStrategy(training.eval_strategy)
    wanted = strategy != IntervalStrategy.NO
    if data.has_evaluation != wanted:
        given = "given" if data.has_evaluation else "not given"
        raise ConfigError(
            f"eval_strategy is {strategy.value!r} and evaluation data is {given}: "
            "expected eval_path or eval_fraction together with eval_strategy steps or epoch"
        )
    assert training.max_length is not None, "check_training refuses it"
    options = SampleOptions(
        max_length=training.max_length,
        on_bad_sample="error" if data.on_bad_sample == "error" else "skip",
        thinking=data.thinking,
        thinking_effort=None if data.thinking_effort == "none" else data.thinking_effort,
        train_opening_tag=data.train_opening_tag,
        num_proc=training.dataset_num_proc,
    )
    train = _read(data.train_path, tokenizer, options)
    held_out = None
    if data.eval_path is not None:
        held_out = _read(data.eval_path, tokenizer, options)
    elif data.eval_fraction:
        train, held_out = _split(train, data.eval_fraction, training.seed)
    packs_evaluation = training.packing if training.eval_packing is None else training.eval_packing
    if packs_evaluation != training.packing and held_out is not None:
        raise ConfigError(
            f"eval_packing is {packs_evaluation} and packing is {training.packing}, expected the "
            "same: leave eval_packing out"
        )
    if training.packing:
        sizes = (options.max_length, training.seed)
        train = _packed("train", train, *sizes)
        held_out = None if held_out is None else _packed("eval", held_out, *sizes)
    return train, held_out


def _architecture(model: ModelArguments) -> Architecture:
    return parse_config(read_config(resolve_checkpoint(model.base, weights=False)))


def _read(path: str, tokenizer: K3Tokenizer, options: SampleOptions) -> datasets.Dataset:
    samples = load_samples(path, tokenizer, options)
    level = logging.WARNING if samples.report.bad else logging.INFO
    logger.log(level, "%s", samples.report)
    return samples.dataset


def _split(
    dataset: datasets.Dataset, fraction: float, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    count = round(len(dataset) * fraction)
    if not 0 < count < len(dataset):
        raise ConfigError(
            f"eval_fraction is {fraction:g} of {len(dataset)} samples, which is {count}: expected "
            "at least one sample on either side"
        )
    held_out = set(Random(seed).sample(range(len(dataset)), count))
    rest = [index for index in range(len(dataset)) if index not in held_out]
    return dataset.select(rest), dataset.select(sorted(held_out))


def _packed(name: str, dataset: datasets.Dataset, max_length: int, seed: int) -> datasets.Dataset:
    packed = pack(dataset, max_length, seed=seed)
    logger.info(
        "%s: %d samples in %d rows of %d tokens, %.1f %% full",
        name,
        packed.num_documents,
        len(packed.rows),
        packed.max_length,
        100 * packed.fill,
    )
    return packed.rows
