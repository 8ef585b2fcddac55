"""Pinned trajectories, scored every step by engine and trainer with the same adapter version.

Nothing is sampled and nothing else changes between two scores, so what moves them is the adapter:
a push that did not arrive shows at once, however large the floor of sampled tokens is. With an
engine in this process the trainer scores under the engine's numerics, and the two agree to the last
bit unless their adapters differ.

Shape letters: ``T`` tokens of the trajectories' completions, one after the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tune.errors import ConfigError
from k3tune.monitor.samples import Floats, Samples

TOKENS = 128
"""Tokens to pin: one long completion, or several short ones. In BF16 a score scatters by as much as
the first adapter versions move it, so a scale shows in many tokens only."""

_NOISE_FACTOR = 4.0
_KEPT_VERSIONS = 8
# an engine that moved by less of what the trainer moved by did not move
_STILL = 0.02
# two scores in fp32 by one path are equal; their mean is rounded
_EXACT = 1e-6
# BF16 has 8 bits: a rounded adapter moves scores by at most so much less or more (2e-4 on k3-nano)
_ROUNDED_ADAPTER = 0.004
# Where the changes of both sides are multiples of each other, a scale that is off by so much is;
# where the numerics scatter them, it must be off by more, and by so many of its standard errors. On
# k3-nano an expert without its factors changed the scale by up to 0.11 at 7 standard errors, and an
# alpha twice as large by 0.5 to 1.5 at 8 to 20 from the second version on.
_SCALE_FIT = 0.97
_SCALE_OFF = 0.08
_SCALE_OFF_SCATTERED = 0.25
_SCALE_ERRORS = 6.0
# A flipped route makes a token jump: so many tokens do not say what the scale is. On k3-nano in
# BF16 with MXFP8 activations an alpha twice as large is 1.4 with all tokens, and 2.1 without these.
_JUMPS = 0.05
_MOST_ROUNDS = 10


@dataclass(frozen=True)
class CanaryCheck:
    """What a canary said at one version.

    Attributes:
        record: the field ``canary`` of the log's ``mismatch``.
        cause: of :data:`k3tune.monitor.record.CAUSES`; None if both moved together, or nothing
            moved, or the difference has no name.
        text: a sentence about the cause; "" without one.
    """

    record: dict[str, Any]
    cause: str | None
    text: str

    @property
    def failed(self) -> bool:
        """Whether engine and trainer disagree about the adapter."""
        return self.record["verdict"] not in ("moved together", "nothing moved")


class Canary:
    """Compares the two scores of the trajectories, version by version.

    Args:
        engine_base, trainer_base: ``[T]``, scores at version 0 (B = 0), nats.
        adapter_rounded: the engine rounds the adapter's factors more than the trainer that scores.
    """

    def __init__(
        self,
        engine_base: Sequence[float],
        trainer_base: Sequence[float],
        *,
        adapter_rounded: bool = False,
    ) -> None:
        self._engine_base, self._trainer_base = _scores(engine_base), _scores(trainer_base)
        self._adapter_rounded = adapter_rounded
        self._engine_before = self._engine_base
        self._trainer_of = {0: self._trainer_base}
        self._version = 0
        if self._engine_base.shape != self._trainer_base.shape:
            raise ConfigError(
                f"the canary has {self._engine_base.size} scores of the engine and "
                f"{self._trainer_base.size} of the trainer, expected as many"
            )

    @property
    def noise(self) -> float:
        """Mean |engine - trainer| with the adapter at B = 0, nats."""
        return _distance(self._engine_base, self._trainer_base)

    def check(self, version: int, engine: Sequence[float], trainer: Sequence[float]) -> CanaryCheck:
        """Compare the scores both sides gave with one version.

        Args:
            version: the adapter's, the same on both sides as far as they know.
            engine, trainer: ``[T]``, nats.

        Raises:
            ConfigError: for a score that is not finite or another number of scores.
        """
        e, t = _scores(engine), _scores(trainer)
        if e.shape != self._engine_base.shape or t.shape != e.shape:
            raise ConfigError(
                f"the canary has {self._engine_base.size} tokens, got {e.size} scores of the "
                f"engine and {t.size} of the trainer"
            )
        trainer_before = self._trainer_of[self._version]
        scale, fit, tokens = _scale(e - self._engine_base, t - self._trainer_base)
        record: dict[str, Any] = {
            "engine_moved": _distance(e, self._engine_base),
            "trainer_moved": _distance(t, self._trainer_base),
            "engine_step": _distance(e, self._engine_before),
            "trainer_step": _distance(t, trainer_before),
            "difference": _distance(e, t),
            "floor": self.noise,
            "scale": scale,
            "scale_fit": fit,
        }
        record["verdict"] = self._verdict(record)
        cause, text = self._cause(version, e, record, tokens)
        self._remember(version, e, t)
        return CanaryCheck(record, cause, text)

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint; :meth:`restored` reads them."""
        return {
            "engine_base": self._engine_base.tolist(),
            "trainer_base": self._trainer_base.tolist(),
            "adapter_rounded": self._adapter_rounded,
            "engine_before": self._engine_before.tolist(),
            "trainer_of": {str(key): value.tolist() for key, value in self._trainer_of.items()},
            "version": self._version,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Canary":
        """The canary whose :meth:`state` was taken."""
        canary = cls(
            state["engine_base"], state["trainer_base"], adapter_rounded=state["adapter_rounded"]
        )
        canary._engine_before = _scores(state["engine_before"])
        canary._trainer_of = {int(k): _scores(v) for k, v in state["trainer_of"].items()}
        canary._version = state["version"]
        return canary

    def _tolerance(self, moved: float) -> float:
        rounding = _ROUNDED_ADAPTER * moved if self._adapter_rounded else 0.0
        return _NOISE_FACTOR * self.noise + _EXACT + rounding

    def _verdict(self, record: Mapping[str, float]) -> str:
        engine_step, trainer_step = record["engine_step"], record["trainer_step"]
        together = record["difference"] <= self._tolerance(record["trainer_moved"])
        if max(engine_step, trainer_step) <= _EXACT:
            return "nothing moved" if together else "differ"
        # also where both are within the noise: an adapter that arrived moves something
        if engine_step <= _STILL * trainer_step:
            return "engine did not move"
        if trainer_step <= _STILL * engine_step:
            return "trainer did not move"
        return "moved together" if together else "differ"

    def _cause(
        self, version: int, e: Floats, record: Mapping[str, Any], tokens: int
    ) -> tuple[str | None, str]:
        if record["verdict"] in ("moved together", "nothing moved", "trainer did not move"):
            return None, ""
        if record["engine_moved"] <= _EXACT and version > 1:
            return "adapter not applied", (
                f"the engine scores the canary as the base does at version {version}: no push "
                "has reached its samples"
            )
        lag = self._lag(version, e, record["difference"])
        if lag is not None:
            return "stale adapter", (
                f"the engine scores the canary with version {lag} where the trainer has {version}"
            )
        if record["verdict"] == "engine did not move":
            return "stale adapter", (
                f"the engine's score of the canary did not change with the push of version "
                f"{version}, the trainer's did by {record['trainer_step']:.1e} nats a token"
            )
        scale, fit = record["scale"], record["scale_fit"]
        if _is_off(scale, fit, tokens):
            return "adapter scale", (
                f"the adapter moves the engine's scores {scale:.2f} times as far as the trainer's: "
                "alpha / rank, or rsLoRA's square root, is read differently"
            )
        return None, ""

    def _lag(self, version: int, e: Floats, difference: float) -> int | None:
        """The earlier version whose scores the engine gives, if one fits and this one does not."""
        distances = {v: _distance(e, t) for v, t in self._trainer_of.items() if v < version}
        if not distances:
            return None
        best = min(distances, key=lambda v: distances[v])
        fits = distances[best] <= self._tolerance(0.0)
        return best if fits and distances[best] < difference / 2 else None

    def _remember(self, version: int, e: Floats, t: Floats) -> None:
        self._engine_before, self._version = e, version
        self._trainer_of[version] = t
        for old in sorted(self._trainer_of)[:-_KEPT_VERSIONS]:
            del self._trainer_of[old]


def choose_canaries(samples: Samples) -> list[int]:
    """The samples that tell most, whose tokens were the least certain: :data:`TOKENS` in all.

    An adapter moves no token that is certain. Only the completions should be scored: tokens that no
    policy sampled jump with every route that flips, and say little about an adapter's scale.

    Returns:
        Rows of ``samples``, at least one.
    """
    told = samples.entropy
    if told is None:
        # one rare token is not many uncertain ones
        told = np.minimum(-np.where(samples.finite, samples.rollout, 0.0), 1.0)
    order = np.argsort(-np.where(samples.finite, told, 0.0).sum(axis=1), kind="stable")
    tokens = samples.finite.sum(axis=1)[order].cumsum()
    return [int(row) for row in order[: int((tokens < TOKENS).sum()) + 1]]


def _scale(e: Floats, t: Floats) -> tuple[float | None, float | None, int]:
    """Least squares of the engine's change on the trainer's over the tokens that fit best.

    Returns:
        The slope, how much of the engine's change it explains, and the number of tokens.
    """
    kept = np.arange(e.size)
    for _ in range(_MOST_ROUNDS):
        if not (t[kept] @ t[kept]) or not (e[kept] @ e[kept]):
            return None, None, len(kept)
        scale = float(e[kept] @ t[kept] / (t[kept] @ t[kept]))
        order = np.argsort(np.abs(e - scale * t), kind="stable")
        better = np.sort(order[: e.size - int(_JUMPS * e.size)])
        if np.array_equal(better, kept):
            break
        kept = better
    rest = e[kept] - scale * t[kept]
    return scale, float(1 - rest @ rest / (e[kept] @ e[kept])), len(kept)


def _is_off(scale: float | None, fit: float | None, tokens: int) -> bool:
    """Whether the engine's changes are the trainer's times something that is not 1."""
    if scale is None or fit is None:
        return False
    off = abs(scale - 1)
    # of a least-squares slope through the origin, whose fit is 1 - rest^2 / e^2
    error = abs(scale) * np.sqrt(max(1 - fit, 0.0) / (max(fit, 1e-9) * max(tokens - 1, 1)))
    multiples = fit > _SCALE_FIT and off > _SCALE_OFF
    return bool(multiples or (off > _SCALE_OFF_SCATTERED and off > _SCALE_ERRORS * error))


def _distance(left: Floats, right: Floats) -> float:
    return float(np.abs(left - right).mean())


def _scores(values: Sequence[float]) -> Floats:
    scores = np.asarray(values, dtype=np.float64)
    if not scores.size or not np.isfinite(scores).all():
        raise ConfigError(
            f"the canary's {scores.size} scores hold {int((~np.isfinite(scores)).sum())} that are "
            "not finite, expected one finite number a token"
        )
    return scores
