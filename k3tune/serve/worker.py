"""The thread that owns the model: it samples, scores and changes adapters, one thing at a time.

Rows of one adapter are sampled together; several adapters take turns, a step each. Everything is
asked for from the server's event loop, which also counts what is under way.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from k3tune.errors import K3TuneError
from k3tune.model.scoring import score_rows
from k3tune.rl.engines.continuous import ContinuousSampler, SampledToken
from k3tune.rl.rollout import Sampling
from k3tune.serve.adapters import AdaptedModel
from k3tune.serve.limits import Limits, Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SCORED_TOGETHER = 8
# a step takes milliseconds on a small base and seconds on the largest
_STUCK_S = 300.0


@dataclass(eq=False)
class _Row:
    """A completion under way, and where its tokens go; an exception ends it."""

    number: int
    adapter: str | None
    tokens: "asyncio.Queue[SampledToken | Exception]"


@dataclass(eq=False)
class _Scoring:
    """Ids to score."""

    adapter: str | None
    ids: list[int]
    future: "Future[list[float | None]]"


class Worker:
    """Owns the model from :meth:`start` to :meth:`stop`.

    Args:
        model: the base and its adapters.
        limits: rows at once, and how many may wait.
        return_routing: give each token's experts.
    """

    def __init__(self, model: AdaptedModel, limits: Limits, *, return_routing: bool) -> None:
        self._model, self._limits, self._return_routing = model, limits, return_routing
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="k3tune-worker", daemon=True)
        self._numbers = itertools.count()
        self._samplers: dict[str | None, ContinuousSampler] = {}
        self._rows: dict[int, _Row] = {}
        self._scorings: list[_Scoring] = []
        self._retiring: set[str] = set()
        self._beat = time.monotonic()
        self._under_way = 0

    def start(self) -> None:
        """Start the thread, from the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is under way ends with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_well(self) -> bool:
        """Whether the thread lives and is not stuck in one step."""
        busy = self._under_way > 0
        stuck = busy and time.monotonic() - self._beat > _STUCK_S
        return self._thread.is_alive() and not stuck

    async def sample(
        self, adapter: str | None, prompt_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncGenerator[SampledToken, None]:
        """Yield a completion's tokens; leaving the loop early stops the sampling.

        Raises:
            Refused: 429 if too many wait already.
            K3TuneError: if the row cannot be sampled.
        """
        self._enter()
        row = _Row(next(self._numbers), adapter, asyncio.Queue())
        ended = False
        try:
            self._tell(lambda: self._submit(row, prompt_ids, sampling, seed))
            while not ended:
                token = await row.tokens.get()
                if isinstance(token, Exception):
                    ended = True
                    raise token
                ended = token.finish_reason is not None
                yield token
        finally:
            self._under_way -= 1
            if not ended:
                self._tell(lambda: self._cancel(row))

    async def score(self, adapter: str | None, ids: Sequence[int]) -> list[float | None]:
        """Log-probability of each id given those before it; None for the first.

        Raises:
            Refused: 429 if too many wait already.
        """
        self._enter()
        try:
            scoring = _Scoring(adapter, list(ids), Future())
            self._tell(lambda: self._scorings.append(scoring))
            return await asyncio.wrap_future(scoring.future)
        finally:
            self._under_way -= 1

    async def load(self, key: str, folder: Path) -> None:
        """Load an adapter between two steps.

        Raises:
            AdapterError, CheckpointError: if it is not usable.
        """
        await self._do(lambda: self._model.load(key, folder))

    def retire(self, key: str) -> None:
        """Unload an adapter once nothing uses it."""
        self._tell(lambda: self._retiring.add(key))

    def _enter(self) -> None:
        if self._stopping:
            raise Refused(503, "the server is stopping", retry_after_s=10)
        most = self._limits.max_batch_size + self._limits.max_waiting
        if self._under_way >= most:
            raise Refused(
                429,
                f"{self._under_way} requests are under way, expected at most {most}: come back",
                retry_after_s=1,
            )
        self._under_way += 1

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _do(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._tell(run)
        return await asyncio.wrap_future(future)

    # from here on: in the thread

    def _run(self) -> None:
        while True:
            self._beat = time.monotonic()
            with self._wake:
                while not (self._commands or self._rows or self._scorings or self._stopping):
                    self._wake.wait()
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            if self._stopping:
                self._fail_all(Refused(503, "the server is stopping"))
                return
            self._step()
            self._score_some()
            self._unload_idle()

    def _submit(self, row: _Row, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        if row.adapter not in self._model:
            # unloaded since its name was looked up
            self._fail([row], Refused(404, "the adapter was unloaded"))
            return
        sampler = self._samplers.get(row.adapter)
        if sampler is None:
            sampler = self._samplers[row.adapter] = ContinuousSampler(
                self._model.base,
                max_batch_size=self._limits.max_batch_size,
                return_routing=self._return_routing,
            )
        try:
            sampler.submit(row.number, prompt_ids, sampling, seed)
        except Exception as error:
            self._fail([row], error)
        else:
            self._rows[row.number] = row

    def _cancel(self, row: _Row) -> None:
        if self._rows.pop(row.number, None) is not None:
            self._samplers[row.adapter].cancel(row.number)

    def _step(self) -> None:
        """A token for every row of every adapter."""
        for adapter, sampler in list(self._samplers.items()):
            if not (sampler.num_active or sampler.num_waiting):
                continue
            self._model.activate(adapter)
            try:
                tokens = sampler.step()
            except Exception as error:
                logger.exception("a step failed: its rows end")
                del self._samplers[adapter]
                failed = [row for row in self._rows.values() if row.adapter == adapter]
                self._fail(failed, _of_the_server(error))
                continue
            self._deliver(tokens)

    def _deliver(self, tokens: Sequence[SampledToken]) -> None:
        pairs = []
        for token in tokens:
            assert isinstance(token.key, int), f"{token.key=}"
            pairs.append((self._rows[token.key], token))
            if token.finish_reason is not None:
                del self._rows[token.key]

        def put() -> None:
            for row, token in pairs:
                row.tokens.put_nowait(token)

        self._loop.call_soon_threadsafe(put)

    def _fail(self, rows: Sequence[_Row], error: Exception) -> None:
        for row in rows:
            self._rows.pop(row.number, None)
            self._loop.call_soon_threadsafe(row.tokens.put_nowait, error)

    def _fail_all(self, error: Exception) -> None:
        self._fail(list(self._rows.values()), error)
        for scoring in self._scorings:
            if scoring.future.set_running_or_notify_cancel():
                scoring.future.set_exception(error)

    @torch.no_grad()
    def _score_some(self) -> None:
        """Those of the first one's adapter, a few together."""
        if not self._scorings:
            return
        adapter = self._scorings[0].adapter
        chosen = [s for s in self._scorings if s.adapter == adapter][:_SCORED_TOGETHER]
        self._scorings = [s for s in self._scorings if s not in chosen]
        # one whose client has left is cancelled
        chosen = [s for s in chosen if s.future.set_running_or_notify_cancel()]
        if not chosen:
            return
        try:
            if adapter not in self._model:
                raise Refused(404, "the adapter was unloaded")
            self._model.activate(adapter)
            scores = score_rows(self._model.base, [s.ids for s in chosen], batch_size=len(chosen))
        except Exception as error:
            if not isinstance(error, Refused):
                logger.exception("scoring failed")
            for scoring in chosen:
                scoring.future.set_exception(_of_the_server(error))
            return
        for scoring, row in zip(chosen, scores, strict=True):
            scoring.future.set_result(row)

    def _unload_idle(self) -> None:
        for key in list(self._retiring):
            sampler = self._samplers.get(key)
            busy = sampler is not None and (sampler.num_active or sampler.num_waiting)
            if busy or any(scoring.adapter == key for scoring in self._scorings):
                continue
            self._retiring.discard(key)
            self._samplers.pop(key, None)
            try:
                self._model.unload(key)
            except Exception:
                logger.exception("an adapter cannot be unloaded: it stays in memory")


def _of_the_server(error: Exception) -> Exception:
    """What a forward says is wrong, which no request is at fault for."""
    return Refused(500, str(error)) if isinstance(error, K3TuneError) else error
