"""Replicas of one server: which takes the next request, and how long one that failed is left alone.

All of it runs in one event loop, so nothing is locked but what waits in the middle.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from k3tune.errors import RolloutError
from k3tune.rl.engines.http import Call, CallFailed, HttpOptions, Server
from k3tune.rl.engines.http_dialect import ServerFacts

logger = logging.getLogger(__name__)

T = TypeVar("T")

# One dropped connection is no news.
_SAID_AFTER = 3
_LONGEST_NAP_S = 1.0


@dataclass
class Replica:
    """One server, and what this client knows of it.

    Attributes:
        server: its connections.
        facts: what it said when it was met; None before.
        in_flight: requests under way.
        paused_until: on the monotonic clock; nothing is sent before.
        failures: in a row, without an answer between them.
        base_scores: of the probe row under the base, a list a try.
        scores: of the probe row, by version confirmed here.
        restored: how often it lost its adapters and got them back.
        changing, restoring: held while its adapters change, and while it gets them back.
    """

    server: Server
    facts: ServerFacts | None = None
    in_flight: int = 0
    paused_until: float = 0.0
    failures: int = 0
    base_scores: list[list[float]] = field(default_factory=list)
    scores: dict[int, list[float]] = field(default_factory=dict)
    restored: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    restoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    @property
    def base(self) -> str:
        """The base's name there."""
        assert self.facts is not None, f"{self.url} was not met yet"
        return self.facts.base


class Pool:
    """Hands out replicas: the least busy of those that are not paused.

    Args:
        urls: at least one, no two the same.
        options: limits and pauses.

    Raises:
        RolloutError: without addresses, or if one is there twice.
        ConfigError: if one is not usable.
    """

    def __init__(self, urls: Sequence[str], options: HttpOptions) -> None:
        self.replicas = [Replica(Server(url, options)) for url in urls]
        if not urls or len({replica.url for replica in self.replicas}) < len(urls):
            raise RolloutError(
                f"the servers are {list(urls)}, expected at least one address, each once"
            )
        self._options = options
        self._changed = asyncio.Condition()
        self._heard = time.monotonic()

    def start_clock(self) -> None:
        """Count outages from now: nothing was asked for before."""
        self._heard = time.monotonic()

    async def lease(self) -> Replica:
        """Wait for a replica with room, and count a request there until :meth:`release`."""
        async with self._changed:
            while True:
                now = time.monotonic()
                with_room = [
                    replica
                    for replica in self.replicas
                    if replica.in_flight < self._options.max_concurrency
                ]
                ready = [replica for replica in with_room if replica.paused_until <= now]
                if ready:
                    chosen = min(ready, key=lambda replica: replica.in_flight)
                    chosen.in_flight += 1
                    return chosen
                # a task that is cancelled may take another's wake-up with it
                pauses = [replica.paused_until - now for replica in with_room]
                wait_s = min([_LONGEST_NAP_S, *pauses])
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def release(self, replica: Replica) -> None:
        """Give a replica back."""
        async with self._changed:
            replica.in_flight -= 1
            self._changed.notify()

    def answered(self, replica: Replica) -> None:
        """Note that a replica works."""
        replica.failures = 0
        self._heard = time.monotonic()

    def failed(self, replica: Replica, failure: CallFailed) -> None:
        """Leave a replica alone for a while, longer each time.

        Raises:
            RolloutError: if no replica has answered anything for ``outage_timeout_s``.
        """
        if failure.status is not None:
            self._heard = time.monotonic()
        silent_s = time.monotonic() - self._heard
        if silent_s > self._options.outage_timeout_s:
            urls = ", ".join(replica.url for replica in self.replicas)
            raise RolloutError(
                f"no server has answered for {silent_s:.0f} s ({urls}): {failure.reason}: start it "
                "again, or check the address"
            )
        replica.failures += 1
        pause_s = self.pause_s(replica.failures)
        if failure.wait_s is not None:
            pause_s = max(pause_s, min(failure.wait_s, self._options.max_backoff_s))
        replica.paused_until = time.monotonic() + pause_s
        if replica.failures == _SAID_AFTER:
            logger.warning("%s: %s: trying again", replica.url, failure.reason)

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row, with a random part against stampedes."""
        longest = self._options.backoff_s * 2.0 ** min(failures - 1, 20)
        return min(longest, self._options.max_backoff_s) * (0.5 + random.random() / 2)

    async def call(self, replica: Replica, call: Call) -> Any:
        """A call that goes to this replica and no other, tried while it is away or busy.

        Raises:
            CallFailed: as soon as it answers something else than success.
            RolloutError: if no replica answers for too long.
        """
        while True:
            try:
                answer = await replica.server.call(call)
            except CallFailed as failure:
                if not failure.away:
                    raise
                self.failed(replica, failure)
                await asyncio.sleep(max(0.0, replica.paused_until - time.monotonic()))
            else:
                self.answered(replica)
                return answer

    async def ask(self, replica: Replica, call: Call, read: Callable[[Any], T]) -> T:
        """A call to this replica whose answer is read, tried again while what is wrong may pass.

        Raises:
            CallFailed: if it does not pass.
            RolloutError: if no replica answers for too long.
        """
        tries = 0
        while True:
            try:
                return read(await self.call(replica, call))
            except CallFailed as failure:
                tries += 1
                if not failure.again or tries >= self._options.max_attempts:
                    raise
                await asyncio.sleep(self.pause_s(tries))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(replica.server.close() for replica in self.replicas))
