"""One step off: rollouts of the next step are sampled while this one trains.

:class:`OverlappedEngine` is an engine like the one it wraps, and takes work ahead of time. What was
asked for with :meth:`~OverlappedEngine.prefetch` is sampled in a thread, from the version that is
live at that moment; the ``generate`` with the same arguments then hands it out. Its samples carry
their own version, so a trainer records their lag, and its importance weights correct for it: they
are ratios to the log-probabilities of the policy that sampled.

:func:`with_next` lets a loop over batches see the one after.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from k3tune.errors import ConfigError, RolloutError
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.replicas_shared import SharedHttpEngine
from k3tune.rl.grpo import K3GRPOTrainer
from k3tune.rl.options import check_overlap
from k3tune.rl.rollout import EngineHealth, Rollout, Sampling
from k3tune.rl.seeds import sample_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Request(NamedTuple):
    """Arguments of one ``generate``, in a form that can be compared."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    seeds: tuple[int, ...]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> "_Request":
        """As ``generate`` is given them."""
        return cls(tuple(map(tuple, prompts)), sampling, tuple(seeds))


class OverlappedEngine:
    """A :class:`k3tune.rl.rollout.RolloutEngine` that samples ahead.

    Args:
        engine: one over HTTP. The local engine runs the weights that train, one after the other.
        max_lag: how many versions older than the live one a sample may be when it is handed out;
            with more it is thrown away, counted, and sampled anew.

    Attributes:
        num_prefetched: samples handed out that were sampled ahead.
        num_discarded: samples thrown away, for their lag or because nobody asked for them.

    Raises:
        ConfigError: for another engine, or a ``max_lag`` below 1.
    """

    def __init__(self, engine: HttpEngine | SharedHttpEngine, *, max_lag: int = 1) -> None:
        if not isinstance(engine, HttpEngine | SharedHttpEngine):
            raise ConfigError(
                f"rollouts were to overlap with training on a {type(engine).__name__}, expected "
                "an engine over HTTP (vllm, sglang): sampling and training would use the same "
                "weights at once"
            )
        if max_lag < 1:
            raise ConfigError(f"max_lag is {max_lag}, expected at least 1: that is the overlap")
        self._engine, self._max_lag = engine, max_lag
        self._thread = ThreadPoolExecutor(1, "k3tune-prefetch")
        self._ahead: tuple[_Request, Future[list[Rollout]]] | None = None
        self.num_prefetched = self.num_discarded = 0

    def prefetch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> None:
        """Begin to sample what the next :meth:`generate` with these arguments will return.

        Args:
            prompts, sampling, seeds: as in ``generate``. What was begun before and not asked for
                is thrown away.
        """
        self._drop("another prefetch came before anybody asked for it")
        request = _Request.of(prompts, sampling, seeds)
        self._ahead = request, self._thread.submit(self._engine.generate, *request)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Hand out what was sampled ahead for these arguments, or sample now.

        Raises:
            RolloutError: from the sampling, ahead or now.
        """
        request = _Request.of(prompts, sampling, seeds)
        if self._ahead is None or self._ahead[0] != request:
            self._drop("other prompts were asked for")
            return self._engine.generate(*request)
        future, self._ahead = self._ahead[1], None
        rollouts = future.result()
        lag = self._engine.live_version - min(rollout.adapter_version for rollout in rollouts)
        if lag > self._max_lag:
            self.num_discarded += len(rollouts)
            logger.warning(
                "%d samples taken ahead are %d versions old, at most %d are used: sampling anew",
                len(rollouts),
                lag,
                self._max_lag,
            )
            return self._engine.generate(*request)
        self.num_prefetched += len(rollouts)
        return rollouts

    def load_adapter(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Make a version live; what is being sampled ahead goes on with the one it began with."""
        self._engine.load_adapter(version, source)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given completions under the live adapter, at temperature 1."""
        return self._engine.score(sequences)

    def check_base(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        expected: Sequence[Sequence[float]],
    ) -> float:
        """Hold the servers' base against the trainer's, see :meth:`HttpEngine.check_base`."""
        return self._engine.check_base(sequences, expected)

    def health(self) -> EngineHealth:
        """That of the engine."""
        return self._engine.health()

    def close(self) -> None:
        """Stop what is being sampled, and close the engine."""
        self._ahead = None
        self._engine.close()
        self._thread.shutdown()

    def _drop(self, why: str) -> None:
        """Wait for what is under way, so that servers are not asked for twice as much."""
        if self._ahead is None:
            return
        (request, future), self._ahead = self._ahead, None
        if not future.cancel():
            try:
                future.result()
            except RolloutError as error:
                logger.warning("sampling ahead failed: %s", error)
        self.num_discarded += len(request.prompts)
        logger.warning("%d samples taken ahead are thrown away: %s", len(request.prompts), why)


class LookAhead:
    """Batches of an iterator, taken some at a time, with a view of those that come next."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def take(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], list[Any]]:
        """The next ``count`` batches, or what is left, and as many after them.

        Args:
            iterator: the one of the call before, or a new one once that has ended.
            count: of batches.
        """
        taken = self._kept + list(islice(iterator, count - len(self._kept)))
        self._kept = list(islice(iterator, count))
        return taken, list(self._kept)


class OverlappedGRPOTrainer(K3GRPOTrainer):
    """A trainer whose engine samples the next step's prompts while it trains on this one's.

    The first step of an epoch is not sampled ahead: its order is drawn when the epoch begins.

    Raises:
        ConfigError: for an engine that cannot sample ahead, samples that serve more than one step,
            or ``on_stale_version`` other than ``correct``: samples are one version old.
    """

    def __init__(self, *args: Any, engine: OverlappedEngine, **kwargs: Any) -> None:
        super().__init__(*args, engine=engine, **kwargs)
        if not isinstance(engine, OverlappedEngine):
            raise ConfigError(
                f"the engine is a {type(engine).__name__}, expected an OverlappedEngine"
            )
        check_overlap(self.args, self.rollout)
        self._ahead = engine
        self._look_ahead = LookAhead()
        self._next_prompts: list[list[int]] = []

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """The batches of an optimizer step; those of the next one are looked at."""
        batches, following = self._look_ahead.take(epoch_iterator, num_batches)
        self._next_prompts = [row["input_ids"] for row in following[0]] if following else []
        return super().get_batch_samples(iter(batches), num_batches, device)

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
        """This step's samples; the next one's begin as soon as they are there."""
        rollouts = super().sample(prompts)
        is_last = self.state.global_step + 1 >= self.state.max_steps
        if self.model.training and self._next_prompts and not is_last:
            self._ahead.prefetch(self._next_prompts, self.sampling, self._next_seeds())
        return rollouts

    def _next_seeds(self) -> list[int]:
        """Those that :meth:`sample` will draw for the next generation."""
        every = self.args.gradient_accumulation_steps
        generation = (self.micro_steps + every) // (self.args.steps_per_generation or 1)
        first = self.args.process_index * len(self._next_prompts)
        return [
            sample_seed(self.args.seed, "train", generation, first + index)
            for index in range(len(self._next_prompts))
        ]


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Each item with the one after it; None after the last."""
    iterator: Iterator[Any] = iter(items)
    for current in iterator:
        for following in iterator:
            yield current, following
            current = following
        yield current, None
