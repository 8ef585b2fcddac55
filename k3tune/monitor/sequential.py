"""Sequential tests of a standardised number: is it drifting away, or only scattering?

A chart's value x at a step becomes ``z = (x - mean) / std`` of clean steps, after the mean was
moved by twice its own standard error: a floor is measured on few prompts, and a step must leave
what the floor may be, not what it was estimated to be. In control z is at most standard normal.

Two CUSUMs ``c <- max(0, c + z - slack)`` watch it, one quick for large shifts and one slow for
small ones. By Siegmund's approximation ``(e^(2 k b) - 2 k b - 1) / (2 k^2)``, with k the slack and
b the limit + 1.166, each fires once in 142,000 clean steps or less often; the EWMA fires above 5 of
its standard deviations, less often still. z is cut to :data:`LARGEST`: one step alone fires none of
them, however far out it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Cusum(NamedTuple):
    """What a CUSUM lets pass at every step, and where it fires."""

    slack: float
    limit: float


CUSUMS = (Cusum(0.5, 10.0), Cusum(1.5, 3.4))
STEPS_BETWEEN_ALARMS = 142_000
"""In-control average run length of each side of each CUSUM, at least."""

CUSUM_LIMIT = 1.0
"""Of a CUSUM in units of its own limit."""

EWMA_WEIGHT = 0.2
# its standard deviation in control is sqrt(weight / (2 - weight)), a third
EWMA_LIMIT = 5 / 3
STEP_LIMIT = 5.0
LARGEST = 4.5
ERRORS_ALLOWED = 2.0
"""Standard errors of the reference's mean that z does not count."""

# a chart that never moved in calibration (no token routed apart) is out at the first move
_SMALLEST_STD = 1e-9


@dataclass
class SequentialTest:
    """EWMA and CUSUMs of one chart, above its mean, and below it where it has two sides."""

    two_sided: bool
    ewma: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * (2 * len(CUSUMS)))

    def update(self, z: float) -> None:
        """Take in one step."""
        z = max(-LARGEST, min(LARGEST, z))
        self.ewma += EWMA_WEIGHT * (z - self.ewma)
        for number in range(len(self.sums)):
            slack, limit = CUSUMS[number // 2]
            if number % 2 and not self.two_sided:
                continue
            away = -z if number % 2 else z
            # once fired it comes down within a few clean steps, however long the fault stayed
            self.sums[number] = min(max(0.0, self.sums[number] + away - slack), 2 * limit)

    @property
    def cusum(self) -> float:
        """The largest of the CUSUMs, each over its own limit."""
        return max(value / CUSUMS[number // 2].limit for number, value in enumerate(self.sums))

    @property
    def fired(self) -> bool:
        """Whether a CUSUM or the EWMA is above its limit."""
        size = abs(self.ewma) if self.two_sided else self.ewma
        return self.cusum > CUSUM_LIMIT or size > EWMA_LIMIT

    def state(self) -> dict[str, float | list[float]]:
        """For a checkpoint; :meth:`restore` reads it."""
        return {"ewma": self.ewma, "sums": list(self.sums)}

    def restore(self, state: Mapping[str, float | list[float]]) -> None:
        """Go on where :meth:`state` was taken."""
        ewma, sums = state["ewma"], state["sums"]
        assert isinstance(ewma, float) and isinstance(sums, list), f"{state=}"
        self.ewma, self.sums = ewma, list(sums)


def standardised(value: float, mean: float, std: float, error: float, *, two_sided: bool) -> float:
    """z of a chart's value (see the module's text).

    Args:
        value: of the step.
        mean, std, error: of clean steps, and the standard error of ``mean``.
        two_sided: values below the mean count as well; else ``error`` only lowers z.
    """
    allowed = ERRORS_ALLOWED * error
    away = value - mean
    if two_sided:
        inside = min(abs(away), allowed)
        away -= inside if away > 0 else -inside
    else:
        away -= allowed
    return away / max(std, _SMALLEST_STD)
