"""A reward function held to its contract: in time, one finite number or None a sample, or named.

It runs in a thread of its own, which is left behind when the deadline has passed. What went wrong
is then looked for sample by sample, so that the error can name one.
"""

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from k3tune.errors import K3TuneError

Columns = Mapping[str, Any]


class RewardError(K3TuneError):
    """A reward function raised, hung or returned something else than a number a sample."""


class GuardedReward:
    """A reward function as TRL calls it.

    Args:
        function: of TRL's signature, plain or ``async``.
        name: for logs and errors.
        deadline_s: seconds for one call.
        skip_bad: give a sample that failed None (no reward from this function) and count it,
            instead of an error.

    Attributes:
        num_bad: samples that failed since it was last set to 0.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, *, deadline_s: float, skip_bad: bool
    ) -> None:
        self.__name__ = name
        self.num_bad = 0
        self._function = function
        self._deadline_s = deadline_s
        self._skip_bad = skip_bad

    def __call__(self, **columns: Any) -> list[float | None]:
        """The rewards of a step's samples.

        Args:
            columns: lists over the samples, and single values that are the same for all.

        Raises:
            RewardError: naming the first sample that failed and how, unless bad ones are skipped.
        """
        count = len(columns["completions"])
        try:
            returned = _call_in_time(self._function, columns, self._deadline_s)
            rewards = _checked(returned, count)
        except _Failure as failure:
            return self._one_by_one(columns, count, str(failure))
        for place, reward in enumerate(rewards):
            if isinstance(reward, _Failure):
                self._note_bad(columns, place, str(reward))
                rewards[place] = None
        return [reward for reward in rewards if not isinstance(reward, _Failure)]

    def _one_by_one(self, columns: Columns, count: int, reason: str) -> list[float | None]:
        """Call again for each sample alone: with a failure of the whole, none is known to fail."""
        rewards: list[float | None] = []
        num_bad = self.num_bad
        for place in range(count):
            single = {name: _part(value, place, count) for name, value in columns.items()}
            try:
                returned = _call_in_time(self._function, single, self._deadline_s)
                [reward] = _checked(returned, 1)
                if isinstance(reward, _Failure):
                    raise reward
            except _Failure as failure:
                self._note_bad(columns, place, str(failure))
                reward = None
            rewards.append(reward)
        if self.num_bad == num_bad:
            raise RewardError(
                f"the reward {self.__name__} {reason} on {count} samples together, and on none of "
                "them alone: expected one finite number or None for each of the list it is given"
            )
        return rewards

    def _note_bad(self, columns: Columns, place: int, reason: str) -> None:
        if not self._skip_bad:
            raise RewardError(
                f"the reward {self.__name__} {reason} on {_described(columns, place)}: mend it, or "
                "set on_bad_reward to skip to go on without this sample's reward"
            )
        self.num_bad += 1


class _Failure(Exception):
    """What a function did wrong, as a sentence without its subject."""


def _call_in_time(function: Callable[..., Any], columns: Columns, deadline_s: float) -> Any:
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            returned = function(**columns)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_wait(returned))
            answers.put((True, returned))
        # a function may raise anything, SystemExit too: the caller says so
        except BaseException as error:
            answers.put((False, error))

    # a daemon: a function that hangs must not keep the process from ending
    threading.Thread(target=work, name="k3tune reward", daemon=True).start()
    try:
        worked, answer = answers.get(timeout=deadline_s)
    except queue.Empty:
        raise _Failure(f"did not return within {deadline_s:g} s") from None
    if not worked:
        raise _Failure(f"raised {type(answer).__name__}: {answer}") from answer
    return answer


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _checked(returned: Any, count: int) -> list[float | _Failure | None]:
    """Numbers, None, or what is wrong with a sample's."""
    if isinstance(returned, torch.Tensor):
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise _Failure(f"returned a {type(returned).__name__}, expected a list of {count} numbers")
    if len(returned) != count:
        raise _Failure(f"returned {len(returned)} rewards, expected {count}")
    rewards: list[float | _Failure | None] = []
    for value in returned:
        if value is None:
            rewards.append(None)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            rewards.append(_Failure(f"returned {value!r}, expected a number or None"))
            continue
        finite = math.isfinite(number)
        rewards.append(number if finite else _Failure(f"returned {number}, expected a finite one"))
    return rewards


def _part(value: Any, place: int, count: int) -> Any:
    """A column's entry as a column of one; single values stay as they are."""
    return [value[place]] if isinstance(value, list) and len(value) == count else value


def _described(columns: Columns, place: int) -> str:
    number = f"sample {place + 1} of the step's {len(columns['completions'])}"
    ids = columns.get("sample_id")
    return number if ids is None else f"{number} (line, item or row {ids[place]} of the data)"
