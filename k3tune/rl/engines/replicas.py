"""A rollout engine over HTTP: one or several servers that answer as one.

A ``generate`` pins the live version: all its samples come from that adapter, whatever is loaded
meanwhile. What is lost on the way is asked for again, with the same prompt and seed, and of every
sample exactly one answer is kept.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from tqdm import tqdm

from k3tune.errors import RolloutError
from k3tune.rl.engines.http import CallFailed, HttpOptions, LoopThread
from k3tune.rl.engines.http_dialect import Dialect, Wanted
from k3tune.rl.engines.replicas_pool import Pool, Replica
from k3tune.rl.engines.replicas_push import PushFolder
from k3tune.rl.engines.replicas_versions import BASE_VERSION, Versions
from k3tune.rl.rollout import EngineHealth, Rollout, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Bytes, so ids of every tokenizer of this form; no text, so that nothing is near certain.
PROBE_IDS = tuple((37 * i * i + 11 * i + 5) % 256 for i in range(48))
_MODE_PROMPT, _MODE_TOKENS, _MODE_TEMPERATURE = PROBE_IDS[:16], 8, 8.0
# logprobs at temperature 8 and at 1 differ by nats; two kernels by hundredths
_MODE_NATS = 0.1
_CLOSE_S = 10.0


@dataclass(frozen=True)
class _Job:
    """One sample of a step."""

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    version: int
    name: str | None
    request_id: str


class HttpEngine:
    """A :class:`k3tune.rl.rollout.RolloutEngine` over one or several servers.

    Adapters go by path: the servers must see a directory under the name it has here. Several
    threads may sample at once; a new version can be loaded while they do.

    Args:
        urls: addresses of the replicas.
        dialect: what they speak.
        options: timeouts and limits.
        push_folder: where pushed tensors are written for the servers; without it
            :meth:`load_adapter` takes directories only.
        probe_ids: row of ids in the base's vocabulary that replicas are compared by.

    Raises:
        ConfigError, RolloutError: if an address is not usable.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        options: HttpOptions | None = None,
        *,
        push_folder: PushFolder | None = None,
        probe_ids: Sequence[int] = PROBE_IDS,
    ) -> None:
        self._options = options or HttpOptions()
        self._dialect = dialect
        self._pool = Pool(urls, self._options)
        self._push_folder = push_folder
        forget = None if push_folder is None else push_folder.remove
        self._versions = Versions(self._pool, dialect, self._options, probe_ids, forget)
        self._checked_modes = False
        self._loop = LoopThread(f"k3tune-{dialect.name}")
        self._closed = False

    @property
    def live_version(self) -> int:
        """The version that a ``generate`` begun now would sample from."""
        return self._versions.live

    @property
    def live_adapter(self) -> tuple[str, Path]:
        """Name and directory of the live version, which is not the base."""
        return self._versions.describe_live()

    def adopt(self, version: int, name: str, folder: Path) -> None:
        """Sample from a version that another process of this run has loaded and confirmed.

        Its directory and its name at the servers stay the other process's to remove.
        """
        self._within_step(
            self._versions.adopt(version, name, folder), f"learning of version {version}"
        )

    def load_adapter(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Load an adapter's directory at all replicas; each must prove that it serves it.

        Args:
            version: above the live one.
            source: a directory that was not loaded before; or tensors, where there is a push
                folder.

        Raises:
            RolloutError: naming the replica and the reason; the version before stays live.
        """
        if isinstance(source, Mapping):
            if self._push_folder is None:
                raise RolloutError(
                    f"the {self._dialect.name} engine takes adapters by path, got tensors: write "
                    "them with save_adapter into a fresh directory that the servers see, or give "
                    "the engine a push folder"
                )
            source = self._push_folder.write(version, source)
        self._within_step(self._versions.load(version, Path(source)), f"loading version {version}")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Sample one completion a prompt, in the order given, all from the version live now.

        Raises:
            RolloutError: if a sample cannot be had, with the reason, or the step's time is over.
        """
        if len(prompts) != len(seeds):
            raise RolloutError(f"{len(prompts)} prompts and {len(seeds)} seeds, expected one each")
        empty = next((number for number, prompt in enumerate(prompts, 1) if not prompt), None)
        if empty is not None:
            raise RolloutError(f"prompt {empty} is empty, expected at least one token id")
        return self._loop.run(self._generate(prompts, sampling, seeds))

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given completions under the live adapter, at temperature 1."""
        return self._within_step(self._score(sequences, use_base=False), "scoring")

    def check_base(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        expected: Sequence[Sequence[float]],
        *,
        tolerance: float = 0.1,
    ) -> float:
        """Hold the servers' base against the trainer's, by probe log-probabilities.

        Args:
            sequences: pairs of prompt ids and completion ids.
            expected: log-probabilities of the completions under the trainer's base without
                adapter, at temperature 1.
            tolerance: largest mean absolute difference, in nats a token. Published engines differ
                by 0.02 to 0.06 from their trainers, another checkpoint by nats.

        Returns:
            The difference found.

        Raises:
            RolloutError: if it is larger.
        """
        found = self._within_step(self._score(sequences, use_base=True), "scoring the base")
        pairs = [
            (a, b)
            for row, want in zip(found, expected, strict=True)
            for a, b in zip(row, want, strict=True)
        ]
        apart = sum(abs(a - b) for a, b in pairs) / len(pairs)
        if not apart <= tolerance:
            raise RolloutError(
                f"the servers' base differs from the trainer's by {apart:.3f} nats a token on "
                f"{len(pairs)} tokens, expected at most {tolerance:g}: serve the checkpoint the "
                "trainer loads"
            )
        return apart

    def health(self) -> EngineHealth:
        """Ask every replica.

        Raises:
            RolloutError: naming one that does not answer.
        """
        return self._loop.run(self._health())

    def close(self) -> None:
        """Unload the adapters of this engine, where the servers still answer."""
        if self._closed:
            return
        self._closed = True
        self._loop.run(self._close())
        self._loop.close()

    def _within_step(self, work: Coroutine[Any, Any, T], what: str) -> T:
        limit_s = self._options.step_timeout_s

        async def bounded() -> T:
            self._pool.start_clock()
            try:
                async with asyncio.timeout(limit_s):
                    return await work
            except TimeoutError:
                raise RolloutError(
                    f"{what} took more than {limit_s:g} s (step_timeout_s): see the servers' logs"
                ) from None

        return self._loop.run(bounded())

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        self._pool.start_clock()
        rollouts: list[Rollout | None] = [None] * len(prompts)
        troubles: Counter[str] = Counter()
        limit_s = self._options.step_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._versions.meet()
                await self._check_modes(sampling)
                version = self._versions.live
                name = self._versions.use(version)
                try:
                    jobs = deque(
                        _Job(index, tuple(prompt), sampling, seed, version, name, _new_id())
                        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
                    )
                    await self._work(jobs, rollouts, troubles)
                finally:
                    self._versions.leave(version)
        except TimeoutError:
            done = sum(rollout is not None for rollout in rollouts)
            raise RolloutError(
                f"the step's {limit_s:g} s (step_timeout_s) are over with {done} of "
                f"{len(prompts)} samples: {_most_common(troubles) or 'the servers were slow'}"
            ) from None
        if troubles:
            logger.warning(
                "%d samples took %d more tries: %s",
                len(prompts),
                troubles.total(),
                _most_common(troubles),
            )
        return [rollout for rollout in rollouts if rollout is not None]

    async def _work(
        self, jobs: deque[_Job], rollouts: list[Rollout | None], troubles: Counter[str]
    ) -> None:
        """As many workers as the replicas take requests: the rest of the jobs waits here."""
        bar = tqdm(
            total=len(jobs),
            desc="rollouts",
            unit="sample",
            leave=False,
            disable=None if self._options.progress is None else not self._options.progress,
        )

        async def worker() -> None:
            while jobs:
                job = jobs.popleft()
                rollouts[job.index] = await self._sample(job, troubles)
                bar.update()

        num_workers = min(len(jobs), self._options.max_concurrency * len(self._pool.replicas))
        with bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(num_workers):
                        group.create_task(worker())
            except* RolloutError as errors:
                raise errors.exceptions[0] from None

    async def _sample(self, job: _Job, troubles: Counter[str]) -> Rollout:
        tries = failures = 0
        while True:
            tries += 1
            replica = await self._pool.lease()
            try:
                return await self._ask(replica, job, f"{job.request_id}-{tries}")
            except CallFailed as failure:
                troubles[f"{replica.url}: {failure.reason}"] += 1
                failures += not failure.away
                if not failure.again or failures >= self._options.max_attempts:
                    raise RolloutError(
                        f"sample {job.index + 1} cannot be had from {replica.url}, after "
                        f"{tries} tries: {failure.reason}"
                    ) from failure
                if failure.away:
                    self._pool.failed(replica, failure)
            finally:
                await self._pool.release(replica)
            if failures:
                await asyncio.sleep(self._pool.pause_s(failures))

    async def _ask(self, replica: Replica, job: _Job, request_id: str) -> Rollout:
        """One attempt at one replica, which gets its adapter back first if it lost it."""
        wanted = Wanted(job.name, job.prompt_ids, job.sampling, job.seed, request_id)
        seen = replica.restored
        try:
            answer = await replica.server.call(self._dialect.sample(wanted, replica.base))
        except CallFailed as failure:
            if job.name is None or not self._dialect.is_missing(failure, job.name):
                raise
            await self._versions.restore(replica, job.version, seen)
            raise CallFailed(failure.reason, status=failure.status) from failure
        self._pool.answered(replica)
        sampled = self._dialect.read_sample(answer, wanted, replica.base)
        return Rollout(
            prompt_ids=job.prompt_ids,
            completion_ids=sampled.completion_ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            adapter_version=job.version,
            routed_experts=sampled.routed_experts,
        )

    async def _score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, use_base: bool
    ) -> list[list[float]]:
        await self._versions.meet()
        version = BASE_VERSION if use_base else self._versions.live
        name = self._versions.use(version)
        room = asyncio.Semaphore(self._options.max_concurrency * len(self._pool.replicas))
        scores: list[list[float]] = [[] for _ in sequences]

        async def one(index: int, prompt: Sequence[int], completion: Sequence[int]) -> None:
            async with room:
                found = await self._score_row([*prompt, *completion], version, name)
                scores[index] = found[len(prompt) - 1 :]

        try:
            async with asyncio.TaskGroup() as group:
                for index, sequence in enumerate(sequences):
                    group.create_task(one(index, *sequence))
        except* RolloutError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._versions.leave(version)
        return scores

    async def _score_row(self, ids: list[int], version: int, name: str | None) -> list[float]:
        replica = await self._pool.lease()
        seen = replica.restored
        try:
            try:
                return await self._versions.scores(replica, name, ids)
            except CallFailed as failure:
                if name is None or not self._dialect.is_missing(failure, name):
                    raise
                await self._versions.restore(replica, version, seen)
                return await self._versions.scores(replica, name, ids)
        except CallFailed as failure:
            raise RolloutError(f"{replica.url} cannot score: {failure.reason}") from failure
        finally:
            await self._pool.release(replica)

    async def _check_modes(self, sampling: Sampling) -> None:
        """Refuse servers whose logprobs leave out the temperature.

        At temperature 1 without top-p and top-k all modes agree, and nothing needs checking.
        """
        plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0
        if plain or self._checked_modes:
            return
        await asyncio.gather(*(self._check_mode(replica) for replica in self._pool.replicas))
        self._checked_modes = True

    async def _check_mode(self, replica: Replica) -> None:
        hot = Sampling(_MODE_TOKENS, temperature=_MODE_TEMPERATURE)
        wanted = Wanted(None, _MODE_PROMPT, hot, 0, _new_id())
        try:
            sampled = await self._pool.ask(
                replica,
                self._dialect.sample(wanted, replica.base),
                lambda answer: self._dialect.read_sample(answer, wanted, replica.base),
            )
            ids = [*_MODE_PROMPT, *sampled.completion_ids]
            scores = await self._versions.scores(replica, None, ids)
        except CallFailed as failure:
            raise RolloutError(f"{replica.url}: {failure.reason}") from failure
        plain = scores[len(_MODE_PROMPT) - 1 :]
        apart = sum(abs(a - b) for a, b in zip(sampled.logprobs, plain, strict=True)) / len(plain)
        if apart < _MODE_NATS:
            raise RolloutError(
                f"{replica.url} gives log-probabilities before the temperature: at temperature "
                f"{_MODE_TEMPERATURE:g} they are those of temperature 1 within {apart:.3f} nats; "
                "start vLLM with --logprobs-mode processed_logprobs (SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB), or sample at temperature 1 without top-p and "
                "top-k"
            )

    async def _health(self) -> EngineHealth:
        async def facts(replica: Replica) -> Mapping[str, object]:
            try:
                answers = [await replica.server.call(c) for c in self._dialect.facts_calls()]
                return self._dialect.read_facts(answers).numerics
            except CallFailed as failure:
                raise RolloutError(
                    f"{replica.url} is not up: {failure.reason}: start it, or check the address"
                ) from failure

        numerics = await asyncio.gather(*(facts(replica) for replica in self._pool.replicas))
        if any(other != numerics[0] for other in numerics):
            logger.warning("replicas differ in their numerics: %s", numerics)
        return EngineHealth(self._versions.live, {"engine": self._dialect.name, **numerics[0]})

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._versions.forget_all()
        except TimeoutError:
            logger.warning("the adapters were not unloaded: the servers do not answer")
        await self._pool.close()


def _most_common(troubles: Counter[str]) -> str:
    return "; ".join(f"{count} x {text}" for text, count in troubles.most_common(3))


def _new_id() -> str:
    return f"k3tune-{secrets.token_hex(12)}"
