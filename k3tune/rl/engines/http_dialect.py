"""What differs between servers: the calls, and what comes of their answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from k3tune.rl.engines.http import Call, CallFailed
from k3tune.rl.rollout import FinishReason, Sampling

Causes = Sequence[tuple[str, str]]
"""Patterns of what a server says, and what to do then; ``{rank}`` is the adapter's."""

# Set in every request: a server takes what is missing from the base's generation_config.json.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
}


class Wanted(NamedTuple):
    """One sample to ask for.

    ``model`` is the adapter's name at the server, or None for the base; ``request_id`` comes back
    in the answer, which tells mixed-up answers apart.
    """

    model: str | None
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    request_id: str


class Sampled(NamedTuple):
    """What an answer holds, checked; ``routed_experts`` is ``[T - 1, L, A]`` int16 or None."""

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself: the base's name there, and what its numerics depend on."""

    base: str
    numerics: Mapping[str, Any] = field(default_factory=dict)


class Dialect(Protocol):
    """One kind of server.

    Readers raise :class:`CallFailed` for an answer that cannot be used.
    """

    name: str

    def facts_calls(self) -> tuple[Call, ...]:
        """Calls whose answers :meth:`read_facts` takes."""
        ...

    def read_facts(self, answers: Sequence[Any]) -> ServerFacts:
        """Read the base's name and the numerics."""
        ...

    def sample(self, wanted: Wanted, base: str) -> Call:
        """Ask for one sample; ``base`` is the base's name at the server."""
        ...

    def read_sample(self, answer: Any, wanted: Wanted, base: str) -> Sampled:
        """Read and check it."""
        ...

    def score(self, model: str | None, ids: Sequence[int], base: str, request_id: str) -> Call:
        """Ask for the log-probability of each id given those before it."""
        ...

    def read_scores(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """One a token but the first, at temperature 1."""
        ...

    def load(self, name: str, path: str) -> Call:
        """Load an adapter's directory under a name."""
        ...

    def read_load(self, answer: Any) -> None:
        """Check that it was loaded."""
        ...

    def unload(self, name: str) -> Call:
        """Forget an adapter."""
        ...

    def is_loaded_already(self, failure: CallFailed) -> bool:
        """Whether a refused load says that the name is taken."""
        ...

    def is_missing(self, failure: CallFailed, name: str) -> bool:
        """Whether a refused sample says that the server has no adapter of this name."""
        ...

    def explain(self, failure: CallFailed, *, rank: int) -> str:
        """Why a load was refused, and what to do; a sentence's part."""
        ...


def explained(failure: CallFailed, causes: Causes, rank: int) -> str:
    """The reason of a refused load, with the cause whose pattern it fits.

    Args:
        failure: of the load.
        causes: of a kind of server.
        rank: of the adapter.
    """
    for pattern, cause in causes:
        if re.search(pattern, failure.reason, re.IGNORECASE):
            return f"{failure.reason}: {cause.format(rank=rank)}"
    return failure.reason
