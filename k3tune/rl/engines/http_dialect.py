"""What differs between servers: the calls, and how their answers are read."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from k3tune.files import shown
from k3tune.rl.engines.http import Call, CallFailed
from k3tune.rl.rollout import FinishReason, Sampling

# vLLM writes -inf as -9999.0
_FLOOR = -9000.0
# of a certain token, in 16-bit servers
_ROUNDING = 1e-3

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


def member(answer: Any, *path: str | int) -> Any:
    """A value inside a JSON answer.

    Raises:
        CallFailed: naming the first part that is not there.
    """
    value = answer
    for depth, key in enumerate(path):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            place = ".".join(map(str, path[: depth + 1]))
            raise CallFailed(f"the answer has no {place}: {shown(answer)}") from None
    return value


def checked_ids(value: Any, what: str) -> tuple[int, ...]:
    """A JSON list of token ids.

    Raises:
        CallFailed: if it is none.
    """
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise CallFailed(f"{what} are {shown(value)}, expected a list of token ids")
    return tuple(value)


def checked_logprobs(value: Any, what: str) -> tuple[float, ...]:
    """A JSON list of log-probabilities of tokens that were drawn.

    Raises:
        CallFailed: if it is none, or holds values that no drawn token can have.
    """
    numbers = isinstance(value, list) and all(type(item) in (int, float) for item in value)
    if not numbers or not all(math.isfinite(item) for item in value):
        raise CallFailed(f"{what} are {shown(value)}, expected a list of finite numbers")
    wrong = [item for item in value if not _FLOOR < item <= _ROUNDING]
    if wrong:
        raise CallFailed(
            f"{what} hold {wrong[0]}, which no drawn token can have: start the server so that it "
            "returns log-probabilities of its sampling distribution, not logits",
            again=False,
        )
    return tuple(min(0.0, float(item)) for item in value)


def check_sample(sampled: Sampled, wanted: Wanted) -> Sampled:
    """Hold a sample against what was asked for.

    Raises:
        CallFailed: if it was cut before its end, or is longer than asked for.
    """
    ids, most = sampled.completion_ids, wanted.sampling.max_new_tokens
    if not ids or len(ids) != len(sampled.logprobs):
        raise CallFailed(
            f"the answer has {len(ids)} tokens and {len(sampled.logprobs)} log-probabilities, "
            "expected as many of both and at least one"
        )
    if len(ids) > most or (sampled.finish_reason == "length" and len(ids) < most):
        raise CallFailed(
            f"the completion has {len(ids)} tokens and ended by {sampled.finish_reason}, expected "
            f"{most}: the server cut it (its context length?)"
        )
    stops = wanted.sampling.stop_token_ids
    if sampled.finish_reason == "stop" and stops is not None and ids[-1] not in stops:
        raise CallFailed(
            f"the completion stopped at id {ids[-1]}, expected one of {shown(list(stops))}: the "
            "server stops at the model's end-of-text ids whatever is asked, so name them too",
            again=False,
        )
    return sampled


def decode_base64(text: Any) -> bytes:
    """Bytes of a base64 text.

    Raises:
        CallFailed: if it is none.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CallFailed(f"routed_experts is no base64 ({error})") from error


def moe_rows(experts_TLA: np.ndarray, num_tokens: int, moe_layers: Sequence[int]) -> Tensor:
    """Expert ids of the MoE layers ``[T - 1, L, A]`` int16 from those a server returned.

    Args:
        experts_TLA: of all layers, or of the MoE layers alone.
        num_tokens: prompt and completion.
        moe_layers: zero-based.

    Raises:
        CallFailed: if the shape fits neither.
    """
    shape, most = experts_TLA.shape, max(moe_layers) + 1
    if len(shape) == 3 and shape[1] >= most and shape[1] > len(moe_layers):
        experts_TLA = experts_TLA[:, list(moe_layers)]
    if experts_TLA.ndim != 3 or experts_TLA.shape[:2] != (num_tokens - 1, len(moe_layers)):
        raise CallFailed(
            f"routed_experts has shape {list(shape)}, expected {num_tokens - 1} tokens and the "
            f"{len(moe_layers)} MoE layers of this base"
        )
    return torch.from_numpy(np.ascontiguousarray(experts_TLA.astype(np.int16)))
