"""The arrays the monitor works on: one step's sampled tokens as trainer and engine scored them.

Shape letters: ``S`` samples, ``T`` tokens of the longest completion, ``L`` MoE layers, ``A`` active
experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from k3tune.errors import ConfigError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_PER_TOKEN = ("train", "rollout", "mask", "token_ids", "entropy", "correction")
_NO_EXPERT = -1


@dataclass(frozen=True)
class Samples:
    """Completions and their two log-probabilities; places outside ``mask`` may hold anything.

    Attributes:
        train, rollout: ``[S, T]`` fp64, log-probabilities of the sampled tokens, nats, both under
            the temperature and top-p of the run.
        mask: ``[S, T]``, true at tokens that count.
        prompts: ``[S]``, the same number for samples of one prompt: they are not independent.
        adapter_versions: ``[S]``, the adapter each was sampled with.
        token_ids: ``[S, T]``, or None.
        entropy: ``[S, T]``, of the trainer's distribution at each token, nats, or None: without
            it a wrong temperature is not told from other causes.
        correction: ``[S, T]``, what the importance correction weighed each token with (0: masked),
            or None.
        train_experts, rollout_experts: ``[S, T, L, A]``, global ids chosen where the token was
            predicted, or None.
        prompt_overlap: ``[S]``, the smallest share of experts, over all layers, that both sides
            chose for a token of the prompt (its last predicts the completion and belongs there),
            or None.
    """

    train: Floats
    rollout: Floats
    mask: Bools
    prompts: Ints
    adapter_versions: Ints
    token_ids: Ints | None = None
    entropy: Floats | None = None
    correction: Floats | None = None
    train_experts: NDArray[np.int16] | None = None
    rollout_experts: NDArray[np.int16] | None = None
    prompt_overlap: Floats | None = None

    def __post_init__(self) -> None:
        shape = self.train.shape
        if len(shape) != 2:
            raise ConfigError(f"train has shape {shape}, expected (samples, tokens)")
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = shape if field.name in _PER_TOKEN else shape[:1]
            if field.name in ("train_experts", "rollout_experts"):
                wanted = shape
            if value is not None and value.shape[: len(wanted)] != wanted:
                raise ConfigError(
                    f"{field.name} has shape {value.shape}, expected it to begin with {wanted}, "
                    "as train"
                )

    @property
    def num_samples(self) -> int:
        """Completions, those without a counted token included."""
        return self.train.shape[0]

    @property
    def finite(self) -> Bools:
        """``[S, T]``, tokens that count and have two finite log-probabilities."""
        with np.errstate(invalid="ignore"):
            return self.mask & np.isfinite(self.train) & np.isfinite(self.rollout)

    @property
    def log_ratio(self) -> Floats:
        """r, ``[S, T]``; 0 where :attr:`finite` is false, so it must be used with it."""
        good = self.finite
        return np.where(good, self.train, 0.0) - np.where(good, self.rollout, 0.0)


def make_samples(
    train: Any,
    rollout: Any,
    mask: Any,
    prompts: Any,
    adapter_versions: Any,
    **others: Any,
) -> Samples:
    """Samples from tensors of any dtype and device, arrays, or nested lists.

    Args:
        train, rollout, mask, prompts, adapter_versions, others: the fields of :class:`Samples`.
    """
    kinds = {
        "mask": np.bool_,
        "prompts": np.int64,
        "adapter_versions": np.int64,
        "token_ids": np.int64,
        "train_experts": np.int16,
        "rollout_experts": np.int16,
    }
    given = {
        "train": train,
        "rollout": rollout,
        "mask": mask,
        "prompts": prompts,
        "adapter_versions": adapter_versions,
        **others,
    }
    arrays: dict[str, Any] = {
        name: None if value is None else _array(value, kinds.get(name, np.float64))
        for name, value in given.items()
    }
    return Samples(**arrays)


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Samples of several micro-batches or processes as one; shorter ones are padded with masked
    places. A field that any part lacks is left out.

    Args:
        parts: at least one; ``prompts`` must already differ between different prompts.
    """
    longest = max(part.train.shape[1] for part in parts)
    joined: dict[str, Any] = {}
    for field in fields(Samples):
        values = [getattr(part, field.name) for part in parts]
        if any(value is None for value in values):
            continue
        per_token = field.name in _PER_TOKEN or field.name in ("train_experts", "rollout_experts")
        if per_token:
            fill = _NO_EXPERT if field.name.endswith("_experts") else 0
            values = [_widened(value, longest, fill) for value in values]
        joined[field.name] = np.concatenate(values)
    return Samples(**joined)


def _widened(value: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    padding = [(0, 0)] * value.ndim
    padding[1] = (0, length - value.shape[1])
    return np.pad(value, padding, constant_values=fill)


def _array(value: Any, dtype: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # numpy knows no bfloat16
        value = (value.double() if value.is_floating_point() else value).numpy()
    return np.asarray(value, dtype=dtype)
