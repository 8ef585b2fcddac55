"""``/v1/completions``: token ids or text in, ids, text and log-probabilities out."""

import base64
import io
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from k3tune.data.tokenizer import K3Tokenizer
from k3tune.published.architecture import Architecture
from k3tune.rl.engines.continuous import SampledToken
from k3tune.serve.fields import Fields
from k3tune.serve.limits import Refused
from k3tune.serve.registry import Registry
from k3tune.serve.requests import Model, SampleRequest, read_prompt, read_sample_request
from k3tune.serve.text import TextReader, needed, token_text
from k3tune.serve.worker import Worker


@dataclass(frozen=True)
class Service:
    """What endpoints share.

    Attributes:
        model: what requests are checked against.
        architecture: of the base.
        tokenizer: of the base, or None.
        registry: served names.
        worker: samples and scores.
        returns_routing: whether answers hold the routed experts.
        numerics: of this server, for ``/version``.
    """

    model: Model
    architecture: Architecture
    tokenizer: K3Tokenizer | None
    registry: Registry
    worker: Worker
    returns_routing: bool
    numerics: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """A checked request."""

    prompt_ids: tuple[int, ...]
    prompt_logprobs: bool
    request: SampleRequest
    key: str | None


def read_completion(service: Service, body: dict[str, Any]) -> Completion:
    """Check a body.

    Raises:
        Refused: naming what is wrong.
    """
    fields = Fields(body)
    prompt = read_prompt(fields, service.model)
    if isinstance(prompt, str):
        tokenizer = needed(service.tokenizer, "a prompt that is text")
        prompt = tuple(tokenizer.encode_text(prompt))
    wanted = fields.integer("prompt_logprobs", least=0, most=0)
    request = read_sample_request(fields, service.model, len(prompt), chat=False)
    if wanted is not None and request.stream:
        raise Refused(400, "prompt_logprobs and stream are both there, expected one of them")
    key = service.registry.key_of(request.model)
    return Completion(prompt, wanted is not None, request, key)


async def complete(service: Service, completion: Completion) -> dict[str, Any]:
    """The whole answer."""
    request = completion.request
    scores = None
    if completion.prompt_logprobs:
        scores = await service.worker.score(completion.key, completion.prompt_ids)
    tokens = [token async for token in _tokens(service, completion)]
    reader = TextReader(service.tokenizer)
    text = "".join(map(reader.feed, tokens))
    choice = _choice(service, completion, text, tokens)
    choice["prompt_logprobs"] = (
        None if scores is None else _prompt_logprobs(service, completion.prompt_ids, scores)
    )
    if request.return_token_ids:
        choice["prompt_token_ids"] = list(completion.prompt_ids)
    if service.returns_routing:
        choice["routed_experts"] = encode_routing(tokens, service.architecture)
    return {
        **_envelope(service, request),
        "choices": [choice],
        "usage": usage(len(completion.prompt_ids), len(tokens)),
    }


async def stream(service: Service, completion: Completion) -> AsyncGenerator[dict[str, Any], None]:
    """The answer, an event a token."""
    request = completion.request
    envelope = _envelope(service, request)
    reader = TextReader(service.tokenizer)
    count = 0
    async with aclosing(_tokens(service, completion)) as tokens:
        async for token in tokens:
            choice = _choice(service, completion, reader.feed(token), [token])
            if request.return_token_ids and not count:
                choice["prompt_token_ids"] = list(completion.prompt_ids)
            count += 1
            yield {**envelope, "choices": [choice]}
    if request.include_usage:
        yield {**envelope, "choices": [], "usage": usage(len(completion.prompt_ids), count)}


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Token counts as the API has them."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def stop_reason(service: Service, token: SampledToken) -> int | None:
    """The id that stopped a completion, where it is not the base's own end of text."""
    stopped = token.finish_reason == "stop"
    return (
        token.token_id if stopped and token.token_id not in service.model.stop_token_ids else None
    )


def encode_routing(tokens: Sequence[SampledToken], architecture: Architecture) -> str:
    """Experts of every token but the last, as a base64 ``.npy`` file.

    ``[T - 1, all layers, A]``, uint8 where it holds the ids; rows of dense layers are zero.
    """
    parts = [token.routed_experts for token in tokens if token.routed_experts is not None]
    experts_TLA = torch.cat(parts)
    num_tokens, _, width = experts_TLA.shape
    dtype = torch.uint8 if architecture.num_experts <= 256 else torch.uint16
    full = torch.zeros(num_tokens, architecture.num_hidden_layers, width, dtype=dtype)
    full[:, list(architecture.moe_layers)] = experts_TLA.cpu().to(dtype)
    file = io.BytesIO()
    np.save(file, full.numpy(), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _tokens(service: Service, completion: Completion) -> AsyncGenerator[SampledToken, None]:
    request = completion.request
    return service.worker.sample(
        completion.key, completion.prompt_ids, request.sampling, request.seed
    )


def _envelope(service: Service, request: SampleRequest) -> dict[str, Any]:
    return {
        "id": f"cmpl-{request.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model or service.registry.base,
    }


def _choice(
    service: Service, completion: Completion, text: str, tokens: Sequence[SampledToken]
) -> dict[str, Any]:
    request = completion.request
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": tokens[-1].finish_reason,
        "stop_reason": stop_reason(service, tokens[-1]),
    }
    if request.logprobs:
        names = [token_text(service.tokenizer, token.token_id) for token in tokens]
        logprobs = [token.logprob for token in tokens]
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
            "text_offset": [],
        }
    if request.return_token_ids:
        choice["token_ids"] = [token.token_id for token in tokens]
    return choice


def _prompt_logprobs(
    service: Service, ids: Sequence[int], scores: Sequence[float | None]
) -> list[dict[str, Any] | None]:
    return [
        None
        if score is None
        else {str(i): {"logprob": score, "decoded_token": token_text(service.tokenizer, i)}}
        for i, score in zip(ids, scores, strict=True)
    ]
