"""Fine-tune Kimi K3 without ever leaving 4 bits. Importing this package loads nothing heavy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3tune import model as model
    from k3tune import published as published
    from k3tune import quant as quant
    from k3tune.model import load_base

__version__ = "0.1.0"
__all__ = ["__version__", "load_base"]

_SUBPACKAGES = ("model", "published", "quant")
_ORIGINS = {"load_base": "k3tune.model"}


def __getattr__(name: str) -> Any:
    """Import a subpackage, or the home of a public name, when somebody first asks for it."""
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _ORIGINS:
        return getattr(import_module(_ORIGINS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *_ORIGINS})
