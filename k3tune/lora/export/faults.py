"""The faults a verification can find, by name."""

from collections.abc import Iterable
from dataclasses import dataclass

from k3tune.lora.plan import listed

FILE_TRUNCATED = "file truncated"
FILE_DAMAGED = "file damaged"
NOT_USABLE = "files not usable"
WRONG_BASE = "wrong base"
BASE_CHANGED = "base changed"
STALE_VERSION = "stale version"
KEY_MISSPELT = "key misspelt"
LAYER_MISSING = "layer missing"
FACTOR_MISSING = "factor missing"
LEFT_OVER = "factor left over"
SWAPPED_HALVES = "A and B swapped"
TRUNCATED_FACTOR = "factor truncated"
WRONG_SHAPE = "wrong shape"
SHARED_REPEATED = "shared factor repeated"
NOT_FINITE = "not finite"
ALL_ZERO = "all B zero"
TENSOR_CHANGED = "tensor changed"
EXPERT_ORDER = "expert order rotated"
RANK_ORDER = "rank-fastest against expert-fastest"
SWAPPED_GATE_UP = "gate and up swapped"
ALPHA_TWICE = "alpha applied twice"
ALPHA_NEVER = "alpha never applied"
WRONG_SCALE = "wrong scale"
WRONG_VALUES = "factor differs"
LOST = "dropped by the engine"
REFUSED = "refused by the engine"
FORWARD_DIFFERS = "forward differs"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: one of this module's names.
        where: the file, tensor or module it is about; of several the first ones.
        detail: what was expected and what was found.
    """

    name: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.where}: {self.detail}"


class FaultList:
    """Collects faults; those of one name and detail become one."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, where: str | Iterable[str], detail: str) -> None:
        """Note a fault."""
        places = [where] if isinstance(where, str) else list(where)
        self._found.setdefault((name, detail), []).extend(places)

    @property
    def faults(self) -> list[Fault]:
        """What was found, in the order it was."""
        return [Fault(n, listed(places), detail) for (n, detail), places in self._found.items()]

    def names(self) -> set[str]:
        """Names of what was found."""
        return {name for name, _ in self._found}
