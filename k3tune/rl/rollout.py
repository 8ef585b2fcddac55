"""What a rollout is, and what every engine that samples one can do.

Standard library and torch only. Shape letters: ``T`` tokens of prompt and completion, ``L`` MoE
layers, ``A`` active experts a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from k3tune.errors import ConfigError

FinishReason = Literal["stop", "length"]
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """The distribution tokens are drawn from, and when a completion ends.

    Attributes:
        max_new_tokens: longest completion, its stop token included.
        temperature: divides the logits, above 0.
        top_p: smallest probability mass drawn from, above 0 and at most 1; 1 is all.
        top_k: number of likeliest tokens drawn from; 0 is all.
        stop_token_ids: ids that end a completion and are its last token; None takes the model's.

    Raises:
        ConfigError: naming the first field out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 < self.temperature < math.inf, "a finite number above 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
        )
        for name, fits, wanted in checks:
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {wanted}")


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    Attributes:
        prompt_ids: as given to the engine.
        completion_ids: sampled tokens, the stop token included where one was drawn.
        logprobs: one a completion token, of the distribution it was drawn from (after temperature,
            top-p and top-k), in nats.
        finish_reason: ``stop`` or ``length``.
        adapter_version: the adapter that was live for all of its tokens.
        routed_experts: ``[T - 1, L, A]`` int16 global expert ids, those of the tokens that predict
            (all but the last), or None where the engine does not return them.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    adapter_version: int
    routed_experts: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.completion_ids) or not self.completion_ids:
            raise ConfigError(
                f"a rollout has {len(self.completion_ids)} tokens and {len(self.logprobs)} "
                "logprobs, expected as many of both and at least one"
            )


@dataclass(frozen=True)
class EngineHealth:
    """What an engine says of itself.

    Attributes:
        adapter_version: the version that is live, on every replica.
        numerics: what the floor depends on, as JSON values: engine, version, dtype, activations,
            kernels. Two runs with equal ones have the same floor.
    """

    adapter_version: int
    numerics: Mapping[str, Any]


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from the base with one live adapter. Errors are :class:`k3tune.errors.RolloutError`.

    Version 0 is the base with the adapter at B = 0.
    """

    def load_adapter(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Make an adapter live; when this returns, every later sample carries ``version``.

        Args:
            version: above the live one.
            source: an adapter directory, or the tensors of ``k3tune.lora.adapter_state``.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Sample one completion a prompt, in the order given.

        Args:
            prompts: token ids; repeat a prompt for several samples of it.
            sampling: the distribution.
            seeds: one a prompt, 0 to ``MAX_SEED``: a completion's tokens depend on its own prompt
                and seed, not on what else is sampled (up to rounding of the batch).
        """
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given completions under the live adapter, at temperature 1.

        Args:
            sequences: pairs of prompt ids and completion ids.
        """
        ...

    def health(self) -> EngineHealth:
        """Answer quickly, or raise."""
        ...

    def close(self) -> None:
        """Release everything; a second call does nothing."""
        ...
