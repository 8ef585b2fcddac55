"""Packages whose names cost nothing until somebody asks for them."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(
    package: str,
    *,
    names: Mapping[str, str] | None = None,
    subpackages: tuple[str, ...] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the module-level ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: ``__name__`` of the package.
        names: public name -> module that defines it; imported on first use, then kept.
        subpackages: modules below the package that resolve as its attributes.

    Raises:
        AttributeError: from the returned ``__getattr__``, for any other name.
    """
    origins = dict(names or {})

    def get(name: str) -> Any:
        if name in origins:
            value = getattr(import_module(origins[name]), name)
        elif name in subpackages:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names_offered() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins, *subpackages})

    return get, names_offered
