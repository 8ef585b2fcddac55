"""``/v1/chat/completions``: messages in Kimi K3's chat format, as any OpenAI client sends them."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from k3tune.data.answers import Answer, AnswerReader
from k3tune.data.chat import render_chat
from k3tune.data.tokenizer import K3Tokenizer
from k3tune.errors import K3TuneError
from k3tune.rl.engines.continuous import SampledToken
from k3tune.serve.completions import Service, stop_reason, usage
from k3tune.serve.fields import Fields
from k3tune.serve.limits import Refused
from k3tune.serve.requests import SampleRequest, read_sample_request
from k3tune.serve.text import bytes_of, needed


@dataclass(frozen=True)
class Chat:
    """A checked request."""

    prompt_ids: tuple[int, ...]
    thinking: bool
    tokenizer: K3Tokenizer
    request: SampleRequest
    key: str | None


def read_chat(service: Service, body: dict[str, Any]) -> Chat:
    """Check a body and render its messages.

    Raises:
        Refused: naming what is wrong.
    """
    tokenizer = needed(service.tokenizer, "a chat")
    fields = Fields(body)
    template = Fields(fields.object("chat_template_kwargs"))
    effort = fields.text("reasoning_effort")
    thinking = template.boolean("thinking", effort != "none")
    told = template.text("thinking_effort") or effort
    template.finish({}, frozenset())
    try:
        rendered = render_chat(
            fields.take("messages"),
            tokenizer,
            tools=fields.take("tools"),
            thinking=thinking,
            thinking_effort=None if told == "none" else told or "max",
            tool_choice=fields.take("tool_choice"),
            response_format=fields.take("response_format"),
            add_generation_prompt=True,
        )
    except K3TuneError as error:
        raise Refused(400, str(error)) from error
    # values of types nobody can write in a chat, deep inside tools
    except (TypeError, RecursionError) as error:
        raise Refused(400, f"the chat cannot be rendered ({error})") from error
    prompt_ids = tuple(rendered.input_ids)
    request = read_sample_request(fields, service.model, len(prompt_ids), chat=True)
    key = service.registry.key_of(request.model)
    return Chat(prompt_ids, thinking, tokenizer, request, key)


async def complete(service: Service, chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    tokens = [token async for token in _tokens(service, chat)]
    reader = AnswerReader(chat.tokenizer, thinking=chat.thinking)
    for token in tokens:
        reader.feed(token.token_id)
    answer = reader.answer()
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    calls = _calls(chat, answer)
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(chat, tokens),
        "finish_reason": _finish_reason(tokens[-1], answer),
        "stop_reason": stop_reason(service, tokens[-1]),
    }
    if chat.request.return_token_ids:
        choice["token_ids"] = [token.token_id for token in tokens]
    answered = {
        **_envelope(service, chat, "chat.completion"),
        "choices": [choice],
        "usage": usage(len(chat.prompt_ids), len(tokens)),
    }
    if chat.request.return_token_ids:
        answered["prompt_token_ids"] = list(chat.prompt_ids)
    return answered


async def stream(service: Service, chat: Chat) -> AsyncGenerator[dict[str, Any], None]:
    """The answer, an event a token; tool calls come whole, with the last."""
    envelope = _envelope(service, chat, "chat.completion.chunk")
    reader = AnswerReader(chat.tokenizer, thinking=chat.thinking)
    count = 0
    async with aclosing(_tokens(service, chat)) as tokens:
        async for token in tokens:
            delta: dict[str, Any] = {}
            if not count:
                delta = {"role": "assistant", "content": ""}
            count += 1
            piece = reader.feed(token.token_id)
            if piece is not None:
                name = "reasoning_content" if piece.channel == "think" else "content"
                delta[name] = piece.text
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            choice["logprobs"] = _logprobs(chat, [token])
            if chat.request.return_token_ids:
                choice["token_ids"] = [token.token_id]
            if token.finish_reason is not None:
                answer = reader.answer()
                calls = _calls(chat, answer)
                if calls:
                    delta["tool_calls"] = [
                        {"index": index, **call} for index, call in enumerate(calls)
                    ]
                choice["finish_reason"] = _finish_reason(token, answer)
                choice["stop_reason"] = stop_reason(service, token)
            yield {**envelope, "choices": [choice]}
    if chat.request.include_usage:
        yield {**envelope, "choices": [], "usage": usage(len(chat.prompt_ids), count)}


def _tokens(service: Service, chat: Chat) -> AsyncGenerator[SampledToken, None]:
    request = chat.request
    return service.worker.sample(chat.key, chat.prompt_ids, request.sampling, request.seed)


def _envelope(service: Service, chat: Chat, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{chat.request.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": chat.request.model or service.registry.base,
    }


def _finish_reason(last: SampledToken, answer: Answer) -> str:
    stopped = last.finish_reason == "stop"
    return "tool_calls" if stopped and answer.tool_calls else last.finish_reason or "stop"


def _calls(chat: Chat, answer: Answer) -> list[dict[str, Any]]:
    """Tool calls as the API has them: arguments are JSON text."""
    return [
        {
            "id": f"call_{chat.request.request_id}_{index}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False)
                if call.unparsed is None
                else call.unparsed,
            },
        }
        for index, call in enumerate(answer.tool_calls)
    ]


def _logprobs(chat: Chat, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
    """Of every sampled token, markup included."""
    if not chat.request.logprobs:
        return None
    content = []
    for token in tokens:
        data = bytes_of(chat.tokenizer, token.token_id)
        content.append(
            {
                "token": data.decode("utf-8", "replace"),
                "logprob": token.logprob,
                "bytes": list(data),
                "top_logprobs": [],
            }
        )
    return {"content": content}
