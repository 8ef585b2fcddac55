"""Requests for completions, checked: nothing after this meets a value it does not expect."""

import secrets
from dataclasses import dataclass
from typing import Any

from k3tune.errors import ConfigError
from k3tune.files import shown
from k3tune.rl.rollout import MAX_SEED, Sampling
from k3tune.serve.fields import Fields, checked_ids
from k3tune.serve.limits import Limits, Refused

# Options of the API that this server has with one value only.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "echo": (False,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (True, False),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
}
# Labels of the caller's, which change no answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "priority", "safety_identifier"})
# Logits are divided by it, and those of all rows must stay finite; 0 takes the likeliest token.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-4, 100.0


@dataclass(frozen=True)
class Model:
    """What requests are checked against.

    Attributes:
        vocab_size: of the base.
        stop_token_ids: that end a text, as the checkpoint says.
        chat_stop_ids: that end an answer.
        limits: of the server.
    """

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    chat_stop_ids: tuple[int, ...]
    limits: Limits


@dataclass(frozen=True)
class SampleRequest:
    """What both kinds of completions ask for.

    Attributes:
        model: a name, or None for the base.
        sampling: the distribution and where it ends.
        seed: drawn here if the request has none.
        logprobs: whether to return those of the sampled tokens.
        stream, include_usage: whether to send tokens as they come, and counts at the end.
        return_token_ids: whether to return ids beside text.
        request_id: comes back in the answer.
    """

    model: str | None
    sampling: Sampling
    seed: int
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    request_id: str


def read_prompt(fields: Fields, model: Model) -> str | tuple[int, ...]:
    """``prompt``: a text or token ids, or a list with one of them.

    Raises:
        Refused: for anything else.
    """
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], list | str):
        raise Refused(
            400,
            f"prompt is {shown(prompt)}, expected one text or one list of token ids that is not "
            "empty: send a request a prompt",
        )
    return checked_ids(prompt, "prompt", most=model.vocab_size)


def read_sample_request(
    fields: Fields, model: Model, num_prompt_tokens: int, *, chat: bool
) -> SampleRequest:
    """The fields that are not the prompt.

    Args:
        fields: of the body; all of them are used up.
        model: for ranges.
        num_prompt_tokens: of the prompt, which leave room for so many less.
        chat: chat's names, defaults and stop ids.

    Raises:
        Refused: naming the first field that is not usable.
    """
    stream = fields.boolean("stream")
    options = Fields(fields.object("stream_options"))
    include_usage = options.boolean("include_usage")
    options.finish({"continuous_usage_stats": (False,)}, frozenset())
    request = SampleRequest(
        model=fields.text("model"),
        sampling=_read_sampling(fields, model, num_prompt_tokens, chat=chat),
        seed=_read_seed(fields),
        logprobs=_read_logprobs(fields, chat=chat),
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.boolean("return_token_ids"),
        request_id=fields.text("request_id", longest=256) or secrets.token_hex(16),
    )
    fields.finish(NEUTRAL, IGNORED)
    return request


def _read_sampling(fields: Fields, model: Model, num_prompt_tokens: int, *, chat: bool) -> Sampling:
    most = model.limits.max_model_len - num_prompt_tokens
    if most < 1:
        raise Refused(
            400,
            f"the prompt has {num_prompt_tokens} tokens, expected at most "
            f"{model.limits.max_model_len - 1}: start the server with a higher --max-model-len",
        )
    longest = fields.integer("max_tokens", least=1, most=most)
    if chat:
        newer = fields.integer("max_completion_tokens", least=1, most=most)
        longest = longest or newer or most
    temperature = fields.number("temperature", 1.0)
    top_p = fields.number("top_p", 1.0)
    # -1 and 0 are all tokens
    top_k = max(0, fields.integer("top_k", least=-1, most=model.vocab_size) or 0)
    stops = set(model.chat_stop_ids if chat else model.stop_token_ids)
    if fields.boolean("ignore_eos"):
        stops.clear()
    stops |= set(fields.ids("stop_token_ids", most=model.vocab_size) or ())
    if temperature != 0 and not _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE:
        raise Refused(
            400,
            f"temperature is {temperature}, expected 0 or a number from {_LEAST_TEMPERATURE} to "
            f"{_MOST_TEMPERATURE}",
        )
    if temperature == 0:
        # the likeliest token is the only one of its distribution
        temperature, top_k = 1.0, 1
    try:
        # 16 is what the API says
        return Sampling(longest or min(16, most), temperature, top_p, top_k, tuple(sorted(stops)))
    except ConfigError as error:
        raise Refused(400, str(error)) from error


def _read_seed(fields: Fields) -> int:
    seed = fields.integer("seed", least=-(2**63), most=MAX_SEED)
    # streams are numbered from 0 on
    return secrets.randbelow(MAX_SEED) if seed is None else seed & MAX_SEED


def _read_logprobs(fields: Fields, *, chat: bool) -> bool:
    if chat:
        return fields.boolean("logprobs")
    wanted = fields.take("logprobs")
    if wanted is not None and (type(wanted) is not int or wanted != 0):
        raise Refused(
            400,
            f"logprobs is {shown(wanted)}, expected 0: this server returns those of the sampled "
            "tokens, not of others",
        )
    return wanted is not None
