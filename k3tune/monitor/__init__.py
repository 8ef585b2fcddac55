"""How far the trainer's policy is from the one that sampled, held against a measured floor."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.monitor.estimators import mismatch
    from k3tune.monitor.floor import Floor
    from k3tune.monitor.watch import FloorMonitor

__all__ = ["Floor", "FloorMonitor", "mismatch"]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "Floor": "k3tune.monitor.floor",
        "FloorMonitor": "k3tune.monitor.watch",
        "mismatch": "k3tune.monitor.estimators",
    },
)
