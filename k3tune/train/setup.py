"""From options to what a trainer takes: the adapted model, the tokenizer, the datasets."""

import logging
from pathlib import Path
from random import Random

import datasets
import torch
from torch import nn
from transformers import IntervalStrategy
from trl import SFTConfig

from k3tune.arguments import DataArguments, LoraArguments, ModelArguments
from k3tune.data import K3Tokenizer, pack
from k3tune.data.sources import SampleOptions, load_samples
from k3tune.errors import ConfigError
from k3tune.lora import LoraSpec, attach_lora, load_adapter
from k3tune.model import load_base
from k3tune.train.options import check_training

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(model: ModelArguments, lora: LoraArguments, training: SFTConfig) -> nn.Module:
    """Load the frozen base onto this process's device and attach the adapter to train.

    Raises:
        ConfigError, CheckpointError, AdapterError: if base or adapter cannot be had as asked.
    """
    base = load_base(
        model.base, dtype=DTYPES[model.dtype], device=training.device, kernels=model.kernels
    )
    if lora.adapter is not None:
        logger.warning("going on with the adapter %s: lora_* options are not used", lora.adapter)
        return load_adapter(base, lora.adapter, trainable=True)
    return attach_lora(base, LoraSpec(**lora.spec_fields(training.seed)))


def load_tokenizer(model: ModelArguments) -> K3Tokenizer:
    """The base's tokenizer.

    Raises:
        ConfigError: if its files are not there.
        CheckpointError: if they do not make one.
    """
    path = model.tokenizer_path
    if Path(path).is_dir() and not (Path(path) / "tiktoken.model").is_file():
        raise ConfigError(
            f"{path} holds no tiktoken.model, expected the tokenizer's files there: download them, "
            "or name their folder with tokenizer"
        )
    try:
        return K3Tokenizer.from_pretrained(path)
    except OSError as error:
        raise ConfigError(f"cannot load the tokenizer of {path}: {error}") from error


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
