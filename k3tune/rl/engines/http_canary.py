"""Whether replicas serve the adapter they were told to, judged by the scores of one fixed row.

Log-probabilities of the row under the base, the version before and the new one are compared. What
replicas differ by under the base, and one differs by from itself, is their noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Replicas differ by at most this many times their noise, plus nats for its rare tails.
_NOISE_FACTOR = 10.0
_NOISE_NATS = 1e-4

Scores = Sequence[float]


class Probe(NamedTuple):
    """Scores of the row at one replica; ``before`` is None where no version was live there."""

    replica: str
    base: Scores
    before: Scores | None
    new: Scores


def distance(left: Scores, right: Scores) -> float:
    """Mean absolute difference, in nats a token."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def noise_of(repeats: Sequence[Sequence[Scores]]) -> float:
    """Largest distance between scores of the base, of one replica or of two.

    Args:
        repeats: scores of several tries, a list a replica.
    """
    rows = [scores for tries in repeats for scores in tries]
    return max(distance(rows[0], row) for row in rows)


def tolerance(noise: float) -> float:
    """Largest distance that noise explains, in nats a token."""
    return _NOISE_FACTOR * noise + _NOISE_NATS


def find_faults(
    probes: Sequence[Probe], noise: float, *, changes_the_base: bool, changed: bool
) -> list[str]:
    """Sentences about replicas that do not serve the new version; empty if all do.

    Args:
        probes: one a replica.
        noise: see :func:`noise_of`.
        changes_the_base: the new adapter has a B that is not zero.
        changed: its tensors differ from those of the version before.
    """
    faults = []
    for probe in probes:
        if changes_the_base and distance(probe.new, probe.base) == 0:
            faults.append(
                f"{probe.replica} answers as the base does, expected the new adapter: it accepted "
                "the adapter and does not apply it"
            )
        elif changed and probe.before is not None and distance(probe.new, probe.before) == 0:
            faults.append(
                f"{probe.replica} answers as with the version before, expected the new one: it "
                "missed the update"
            )
    return faults or _disagreements(probes, noise)


def _disagreements(probes: Sequence[Probe], noise: float) -> list[str]:
    """Name the replica that moved least from the version before, where two do not agree."""
    first, *others = probes
    for other in others:
        apart = distance(first.new, other.new)
        if apart > tolerance(noise):
            still = min(first, other, key=_moved)
            return [
                f"{first.replica} and {other.replica} differ by {apart:.2e} nats a token under "
                f"one version, expected at most {tolerance(noise):.2e} as under the base: "
                f"{still.replica}, which moved less, may have missed the update"
            ]
    return []


def _moved(probe: Probe) -> float:
    return distance(probe.new, probe.base if probe.before is None else probe.before)
