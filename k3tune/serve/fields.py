"""Reads a JSON body field by field; what is not of its type or range is refused by name."""

import json
import math
from typing import Any, NoReturn

from k3tune.files import shown
from k3tune.serve.limits import Refused


def parse_body(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Refused: if it is none.
    """
    try:
        body = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON ({error}), expected a JSON object") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}, expected an object")
    return body


def _refuse_constant(text: str) -> Any:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{text} is not JSON")


class Fields:
    """A body whose fields are taken one by one; null is as good as absent.

    Every method raises :class:`Refused` for a value that is not what it asks for.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._rest = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        """A value of any type; None if it is not there."""
        return self._rest.pop(name, None)

    def text(self, name: str, *, longest: int = 4096) -> str | None:
        """A text that is not empty."""
        value = self.take(name)
        if value is not None and (
            not isinstance(value, str) or not value or len(value) > longest or "\0" in value
        ):
            _refuse(name, value, f"a text of 1 to {longest} characters")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            _refuse(name, value, "true or false")
        return value

    def integer(self, name: str, *, least: int, most: int) -> int | None:
        """A whole number in a range."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            _refuse(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return default
        # a long integer has no float
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            _refuse(name, value, "a finite number")
        return float(value)

    def ids(self, name: str, *, most: int) -> tuple[int, ...] | None:
        """A list of token ids."""
        value = self.take(name)
        return None if value is None else checked_ids(value, name, most=most)

    def object(self, name: str) -> dict[str, Any]:
        """An object; empty if it is not there."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            _refuse(name, value, "an object")
        return value or {}

    def finish(self, neutral: dict[str, tuple[Any, ...]], ignored: frozenset[str]) -> None:
        """Refuse what is left: options this server does not have must not be dropped unsaid.

        Args:
            neutral: fields that may be there with a value that changes nothing.
            ignored: fields that say nothing about the answer.
        """
        for name, value in self._rest.items():
            if name in ignored:
                continue
            if name not in neutral:
                raise Refused(400, f"{shown(name)} is no field this server knows")
            if value not in neutral[name]:
                _refuse(name, value, f"{neutral[name][0]!r}: this server has no other")


def checked_ids(value: Any, name: str, *, most: int) -> tuple[int, ...]:
    """A JSON list as token ids from 0 to below ``most``.

    Raises:
        Refused: if it is none.
    """
    if not isinstance(value, list):
        _refuse(name, value, "a list of token ids")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < most:
            raise Refused(
                400,
                f"{name} holds {shown(token)} at position {place}, expected token ids from 0 to "
                f"{most - 1}",
            )
    return tuple(value)


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise Refused(400, f"{name} is {shown(value)}, expected {expected}")
