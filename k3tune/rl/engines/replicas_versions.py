"""Adapter versions at all replicas: loaded, confirmed, live, forgotten.

Every version gets a name of its own, with a part that no other run has, and a path of its own: a
server's prefix cache is keyed by both, and one that is used twice answers from stale blocks.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3tune.errors import RolloutError
from k3tune.rl.engines.http import CallFailed, HttpOptions
from k3tune.rl.engines.http_adapter import AdapterFolder, read_adapter_folder
from k3tune.rl.engines.http_canary import Probe, distance, find_faults, noise_of, tolerance
from k3tune.rl.engines.http_dialect import Dialect
from k3tune.rl.engines.replicas_pool import Pool, Replica

logger = logging.getLogger(__name__)

BASE_VERSION = 0
_TRIES_OF_BASE = 2


@dataclass
class _Version:
    """A version that servers know; ``users`` counts what samples from it."""

    name: str
    folder: AdapterFolder
    is_own: bool = True
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Versions:
    """The adapters of one engine.

    Args:
        pool: the replicas.
        dialect: how to talk to them.
        options: how many adapters may live.
        probe_ids: the row that replicas are compared by.
        forget: called with the directory of a version that no server has any more.
    """

    def __init__(
        self,
        pool: Pool,
        dialect: Dialect,
        options: HttpOptions,
        probe_ids: Sequence[int],
        forget: Callable[[Path], None] | None = None,
    ) -> None:
        self.live = BASE_VERSION
        self._pool, self._dialect, self._options = pool, dialect, options
        self._probe_ids = list(probe_ids)
        self._after_forget = forget
        self._alive: dict[int, _Version] = {}
        self._paths: set[Path] = set()
        self._prefix = f"k3-{secrets.token_hex(4)}"
        self._noise: float | None = None
        self._counts: Counter[str] = Counter()

    async def meet(self) -> None:
        """Learn every replica's base and its noise, once.

        Raises:
            RolloutError: if one is not up, or they have different bases.
        """
        if self._noise is not None:
            return
        await asyncio.gather(*(self._meet(replica) for replica in self._pool.replicas))
        replicas = self._pool.replicas
        first = replicas[0]
        for other in replicas[1:]:
            apart = distance(first.base_scores[0], other.base_scores[0])
            # another base differs by nats, another kernel by hundredths of one
            if apart > 0.5:
                raise RolloutError(
                    f"{first.url} and {other.url} differ by {apart:.2f} nats a token without any "
                    "adapter, expected one base at all replicas"
                )
        self._noise = noise_of([replica.base_scores for replica in replicas])
        logger.info(
            "%d %s server(s) with base %s; their scores of a probe row differ by %.2e nats a token",
            len(replicas),
            self._dialect.name,
            first.base,
            self._noise,
        )

    async def _meet(self, replica: Replica) -> None:
        try:
            answers = [await self._pool.call(replica, call) for call in self._dialect.facts_calls()]
            replica.facts = self._dialect.read_facts(answers)
            replica.base_scores = [
                await self.scores(replica, None, self._probe_ids) for _ in range(_TRIES_OF_BASE)
            ]
        except CallFailed as failure:
            raise RolloutError(
                f"{replica.url} does not answer as a {self._dialect.name} server does: "
                f"{failure.reason}"
            ) from failure

    def use(self, version: int) -> str | None:
        """Count a user of a version, which keeps it loaded; return its name (None: the base)."""
        if version == BASE_VERSION:
            return None
        record = self._alive[version]
        record.users += 1
        record.idle.clear()
        return record.name

    def leave(self, version: int) -> None:
        """Count a user less."""
        if version != BASE_VERSION:
            record = self._alive[version]
            record.users -= 1
            if not record.users:
                record.idle.set()

    async def load(self, version: int, path: Path) -> None:
        """Load a version at every replica, confirm it at every replica, then make it live.

        Raises:
            RolloutError: naming the replica that refused it or does not serve it; the version
                before stays live.
        """
        await self.meet()
        if version <= self.live:
            raise RolloutError(
                f"version {version} was to be loaded and {self.live} is live, expected a higher "
                "number: count up with every push"
            )
        folder = await asyncio.to_thread(read_adapter_folder, path)
        if folder.path in self._paths:
            raise RolloutError(
                f"{folder.path} was loaded before, expected a fresh directory for every version: "
                "servers keep cached prefixes of the old one under its name"
            )
        await self._make_room()
        # a second try of a version that failed gets another name, too
        self._counts[str(version)] += 1
        tries = self._counts[str(version)]
        record = _Version(f"{self._prefix}-v{version}" + (f"-{tries}" if tries > 1 else ""), folder)
        record.idle.set()
        replicas = self._pool.replicas
        done = await asyncio.gather(
            *(self._load_at(replica, record) for replica in replicas), return_exceptions=True
        )
        failures = [failure for failure in done if isinstance(failure, BaseException)]
        try:
            if failures:
                raise failures[0]
            await self._confirm(version, record)
        except BaseException:
            await self._forget(record)
            raise
        self._paths.add(folder.path)
        self._alive[version] = record
        self.live = version

    def describe_live(self) -> tuple[str, Path]:
        """Name and directory of the live version."""
        record = self._alive[self.live]
        return record.name, record.folder.path

    async def adopt(self, version: int, name: str, path: Path) -> None:
        """Take over a version that somebody else loads, confirms and unloads.

        Raises:
            RolloutError: if it cannot be sampled from.
        """
        await self.meet()
        folder = await asyncio.to_thread(read_adapter_folder, path)
        record = _Version(name, folder, is_own=False)
        record.idle.set()
        for replica in self._pool.replicas:
            replica.scores[version] = await self._first_use(replica, record)
        for old in [old for old in self._alive if not self._alive[old].users]:
            del self._alive[old]
        self._alive[version] = record
        self.live = version

    async def _load_at(self, replica: Replica, record: _Version) -> None:
        call = self._dialect.load(record.name, str(record.folder.path))
        async with replica.changing:
            try:
                answer = await self._pool.call(replica, call)
                self._dialect.read_load(answer)
            except CallFailed as failure:
                # an answer may be lost after the adapter was loaded; the probe tells
                if self._dialect.is_loaded_already(failure):
                    return
                why = self._dialect.explain(failure, rank=record.folder.rank)
                raise RolloutError(f"{replica.url} did not load the adapter: {why}") from failure

    async def _confirm(self, version: int, record: _Version) -> None:
        assert self._noise is not None, "meet() comes first"
        replicas = self._pool.replicas
        scores = await asyncio.gather(*(self._first_use(replica, record) for replica in replicas))
        before = self._alive.get(self.live)
        probes = [
            Probe(replica.url, replica.base_scores[0], replica.scores.get(self.live), new)
            for replica, new in zip(replicas, scores, strict=True)
        ]
        faults = find_faults(
            probes,
            self._noise,
            changes_the_base=record.folder.changes_the_base,
            changed=before is not None and _differ(before.folder, record.folder),
        )
        if faults:
            raise RolloutError(f"adapter version {version} is not live: {'; '.join(faults)}")
        for replica, new in zip(replicas, scores, strict=True):
            replica.scores[version] = new

    async def _first_use(self, replica: Replica, record: _Version) -> list[float]:
        """Scores of the probe row; some servers bind and check an adapter only now."""
        try:
            return await self.scores(replica, record.name, self._probe_ids)
        except CallFailed as failure:
            why = self._dialect.explain(failure, rank=record.folder.rank)
            raise RolloutError(
                f"{replica.url} accepted the adapter {record.name} and cannot use it: {why}"
            ) from failure

    async def restore(self, replica: Replica, version: int, seen: int) -> None:
        """Load a version again at a replica that lost it, as one that was restarted did.

        Args:
            replica: that has no such adapter.
            version: in use.
            seen: ``replica.restored`` when the request that failed was sent; the first of several
                such requests restores, the others find it done.

        Raises:
            RolloutError: if it refuses it, or does not serve what it served before.
        """
        record = self._alive[version]
        async with replica.restoring:
            if replica.restored != seen:
                return
            logger.warning("%s has lost %s: loading it again", replica.url, record.name)
            await self._load_at(replica, record)
            new = await self._first_use(replica, record)
            replica.restored += 1
        apart = distance(new, replica.scores[version])
        assert self._noise is not None, "meet() comes first"
        if apart > tolerance(self._noise):
            raise RolloutError(
                f"{replica.url} was restarted and serves version {version} otherwise than before, "
                f"by {apart:.2e} nats a token, expected at most {tolerance(self._noise):.2e}: "
                "start it with the same base and options"
            )

    async def scores(self, replica: Replica, name: str | None, ids: Sequence[int]) -> list[float]:
        """Log-probability of each id but the first, under an adapter or the base (None).

        Raises:
            CallFailed: if they cannot be had.
        """
        request_id = f"score-{secrets.token_hex(12)}"
        call = self._dialect.score(name, ids, replica.base, request_id)
        return await self._pool.ask(
            replica, call, lambda answer: self._dialect.read_scores(answer, ids)
        )

    async def _make_room(self) -> None:
        """Forget the oldest versions, each once nothing samples from it."""
        while len(self._alive) >= self._options.max_adapters:
            # never the live one: at least two may live
            oldest = min(self._alive)
            await self._alive[oldest].idle.wait()
            await self._forget(self._alive.pop(oldest))
            for replica in self._pool.replicas:
                replica.scores.pop(oldest, None)

    async def _forget(self, record: _Version) -> None:
        """Unload everywhere; a replica that refuses keeps an adapter nobody asks for."""
        call = self._dialect.unload(record.name)
        done = await asyncio.gather(
            *(replica.server.call(call, timeout_s=60) for replica in self._pool.replicas),
            return_exceptions=True,
        )
        for replica, result in zip(self._pool.replicas, done, strict=True):
            # one that never had it has nothing to forget
            if isinstance(result, CallFailed) and result.status not in (400, 404):
                logger.warning("%s keeps %s: %s", replica.url, record.name, result.reason)
        if self._after_forget is not None:
            await asyncio.to_thread(self._after_forget, record.folder.path)

    async def forget_all(self) -> None:
        """Unload every version, for the end of a run."""
        own = [record for record in self._alive.values() if record.is_own]
        await asyncio.gather(*(self._forget(record) for record in own))
        self._alive.clear()
        self.live = BASE_VERSION


def _differ(before: AdapterFolder, now: AdapterFolder) -> bool:
    """Whether an engine must answer otherwise: not where both leave the base as it is."""
    same = now.digest is not None and before.digest == now.digest
    return not same and (before.changes_the_base or now.changes_the_base)
