"""Rewards that ship, and the finding of others by name.

A reward is a callable of TRL's signature: it gets ``prompts``, ``completions``, ``completion_ids``
and every other column of the data as lists over the samples, and returns a number or None for
each. Beside TRL's own (``trainer_state``, ``log_extra``, ``log_metric``) it gets ``replies``: what
each completion says as :class:`k3tune.data.answers.Answer`, None for prompts that are no chats.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3tune.data.answers import Answer
from k3tune.errors import ConfigError

RewardFunction = Callable[..., Any]


def exact_match(
    *, completions: Sequence[Any], replies: Sequence[Answer | None], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 for an answer in exact markup whose response is the column ``answer``, else 0.

    Of a prompt that is no chat the whole completion counts, without blanks around it.
    """
    texts = _responses(completions, replies)
    return [float(text == str(right)) for text, right in zip(texts, answer, strict=True)]


def format_reward(*, replies: Sequence[Answer | None], **_: Any) -> list[float | None]:
    """1 for an answer in exact markup with its end, else 0; None for prompts that are no chats."""
    return [None if reply is None else float(_well_formed(reply)) for reply in replies]


def reasoning_gym_score(
    *,
    completions: Sequence[Any],
    replies: Sequence[Answer | None],
    answer: Sequence[Any],
    metadata: Sequence[Mapping[str, Any]],
    **columns: Any,
) -> list[float]:
    """reasoning-gym's ``score_answer``, 0 to 1; an answer that is not in exact markup has 0.

    The columns ``answer`` and ``metadata`` are those of its items; ``metadata.source_dataset``
    names the generator.
    """
    # an extra: only who rewards with it needs it
    from reasoning_gym import get_score_answer_fn

    questions = columns.get("question") or [None] * len(answer)
    scores = []
    for text, question, right, facts in zip(
        _responses(completions, replies), questions, answer, metadata, strict=True
    ):
        item = {"question": question, "answer": right, "metadata": facts}
        score: Any = get_score_answer_fn(facts["source_dataset"])
        scores.append(0.0 if text is None else float(score(text, item)))
    return scores


SHIPPED: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "format": format_reward,
    "reasoning_gym": reasoning_gym_score,
}


def find_reward(name: str) -> RewardFunction:
    """A shipped reward by its name, or ``file.py:function`` or ``module:function``.

    Raises:
        ConfigError: if there is none, saying where it was looked for.
    """
    if name == "reasoning_gym" and importlib.util.find_spec(name) is None:
        raise ConfigError(
            "rewards holds 'reasoning_gym', which needs the package reasoning-gym: pip install "
            '"k3tune[demo]"'
        )
    if name in SHIPPED:
        return SHIPPED[name]
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ConfigError(
            f"rewards holds {name!r}, expected {', '.join(SHIPPED)}, file.py:function or "
            "module:function"
        )
    module = _load(place)
    found = vars(module).get(function)
    if not callable(found):
        raise ConfigError(
            f"{place} has no function {function!r}, which rewards names: it holds "
            f"{', '.join(sorted(n for n, v in vars(module).items() if callable(v))) or 'none'}"
        )
    return found


def reward_name(name: str) -> str:
    """What a reward is called in logs: the last part of the name it is found by."""
    return name.rpartition(":")[2]


def _load(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"k3tune_reward_{Path(place).stem}", place)
        assert spec is not None and spec.loader is not None, f"{place=}"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # somebody else's code runs here: it may raise anything
    except Exception as error:
        raise ConfigError(
            f"cannot load {place}, which rewards names: {type(error).__name__}: {error}"
        ) from error
    return module


def _well_formed(reply: Answer) -> bool:
    return reply.ended and not reply.malformed


def _responses(completions: Sequence[Any], replies: Sequence[Answer | None]) -> list[str | None]:
    """What each completion responds; None where a chat's markup is not exact."""
    texts: list[str | None] = []
    for completion, reply in zip(completions, replies, strict=True):
        if reply is None:
            texts.append(str(completion).strip())
        else:
            texts.append(reply.content if _well_formed(reply) else None)
    return texts
