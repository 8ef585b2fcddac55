"""Fine-tune Kimi K3 without ever leaving 4 bits. Importing this package loads nothing heavy."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune import data as data
    from k3tune import lora as lora
    from k3tune import model as model
    from k3tune import monitor as monitor
    from k3tune import plan as plan
    from k3tune import published as published
    from k3tune import quant as quant
    from k3tune import rl as rl
    from k3tune import train as train
    from k3tune.lora import load_adapter
    from k3tune.model import load_base

__version__ = "0.1.0"
__all__ = ["__version__", "load_adapter", "load_base"]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={"load_adapter": "k3tune.lora", "load_base": "k3tune.model"},
    subpackages=("data", "lora", "model", "monitor", "plan", "published", "quant", "rl", "train"),
)
