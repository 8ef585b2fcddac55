"""Parts of servers' answers, each checked before anything is made of it."""

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3tune.files import shown
from k3tune.rl.engines.http import CallFailed
from k3tune.rl.engines.http_dialect import Sampled, Wanted

# vLLM writes -inf as -9999.0
_FLOOR = -9000.0
# of a certain token, in 16-bit servers
_ROUNDING = 1e-3


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


def routing_bytes(text: Any) -> bytes:
    """Bytes of an answer's ``routed_experts``.

    Args:
        text: base64, or None where the answer has none.

    Raises:
        CallFailed: if there are none.
    """
    if text is None:
        raise CallFailed(
            "the answer has no routed_experts: start the server with "
            "--enable-return-routed-experts, or turn routing replay off",
            again=False,
        )
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
