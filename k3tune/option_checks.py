"""Checks of single options: each error names the option and shows the value that was seen.

Standard library only: options are read before anything heavy is imported.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from k3tune.errors import ConfigError


def check_text(name: str, value: Any) -> None:
    """Refuse anything but a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {value!r}, expected a text that is not empty")


def check_optional(check: Callable[[str, Any], None], name: str, value: Any) -> None:
    """Check a value unless it is None."""
    if value is not None:
        check(name, value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but true or false."""
    if type(value) is not bool:
        raise ConfigError(f"{name} is {value!r}, expected true or false")


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Refuse anything but an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float = float("inf"),
) -> None:
    """Refuse anything but a number in the range; infinities and NaN are in none."""
    fits = type(value) in (int, float) and value < below
    if fits and least is not None:
        fits = value >= least
    if fits and above is not None:
        fits = value > above
    if not fits:
        low = f"of at least {least:g}" if above is None else f"above {above:g}"
        high = "" if below == float("inf") else f" and below {below:g}"
        raise ConfigError(f"{name} is {value!r}, expected a number {low}{high}")


def check_list(name: str, value: Any, kind: type) -> None:
    """Refuse anything but a list of ``kind`` (str or int) that is not empty."""
    # a lone string would be taken letter by letter
    wanted = f"a list of {'texts' if kind is str else 'integers'}"
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} is {value!r}, expected {wanted} that is not empty")
    for item in value:
        if type(item) is not kind:
            raise ConfigError(f"{name} holds {item!r}, expected {wanted}")


def read_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """A mapping of texts, given as such or as JSON; None stays None."""
    if value is None:
        return None
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} is {value!r}, expected a mapping of pattern to number as JSON ({error})"
            ) from error
    if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
        raise ConfigError(f"{name} is {value!r}, expected a mapping of pattern to number")
    return dict(read)
