"""Engines that sample: :class:`LocalEngine`, in this process from the trainer's own weights."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.rl.engines.continuous import ContinuousSampler, SampledToken
    from k3tune.rl.engines.local import LocalEngine

__all__ = ["ContinuousSampler", "LocalEngine", "SampledToken"]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "ContinuousSampler": "k3tune.rl.engines.continuous",
        "LocalEngine": "k3tune.rl.engines.local",
        "SampledToken": "k3tune.rl.engines.continuous",
    },
)
