"""What a K3 run needs, from the config alone: parameters, bytes a rank, traffic, time, layout.

Arithmetic over sizes; loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.plan.planning import plan

__all__ = ["plan"]
__getattr__, __dir__ = lazy_attributes(__name__, names={"plan": "k3tune.plan.planning"})
