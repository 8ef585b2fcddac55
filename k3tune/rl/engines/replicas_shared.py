"""Servers shared by the processes of one run: one of them pushes, all of them sample."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed

from k3tune.errors import RolloutError
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.rollout import EngineHealth, Rollout, Sampling


class SharedHttpEngine:
    """A :class:`k3tune.rl.rollout.RolloutEngine` in every process of a run.

    :meth:`load_adapter` and :meth:`check_base` are called by all processes together: the first
    loads and confirms the version, the others learn its name, or why it failed. Everything else
    each does on its own, so the servers meet ``max_concurrency`` requests a process.

    Args:
        engine: of this process, over the same servers as those of the others; the first process's
            needs the push folder, if tensors are pushed.
    """

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine
        self._is_first = distributed.get_rank() == 0

    def load_adapter(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Make a version live in all processes, or in none.

        Args:
            version: above the live one.
            source: read by the first process alone.

        Raises:
            RolloutError: in all processes, with the first one's reason.
        """

        def load() -> dict[str, str]:
            self._engine.load_adapter(version, source)
            name, folder = self._engine.live_adapter
            return {"name": name, "folder": str(folder)}

        said = self._by_first(load)
        failure: RolloutError | None = None
        if not self._is_first:
            try:
                self._engine.adopt(version, said["name"], Path(said["folder"]))
            except RolloutError as error:
                failure = error
        num_failed = _sum(int(failure is not None))
        if failure is not None:
            raise failure
        if num_failed:
            raise RolloutError(
                f"{num_failed} of the run's processes cannot sample from adapter version "
                f"{version}: see what they say"
            )

    @property
    def live_version(self) -> int:
        """The version that a ``generate`` begun now would sample from."""
        return self._engine.live_version

    def check_base(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        expected: Sequence[Sequence[float]],
    ) -> float:
        """As :meth:`HttpEngine.check_base`, by the first process; all call it together.

        Raises:
            RolloutError: in all processes, if the base differs.
        """
        said = self._by_first(lambda: {"apart": repr(self._engine.check_base(sequences, expected))})
        return float(said["apart"])

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        """This process's samples."""
        return self._engine.generate(prompts, sampling, seeds)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given completions under the live adapter, at temperature 1."""
        return self._engine.score(sequences)

    def health(self) -> EngineHealth:
        """That of the servers, as this process sees them."""
        return self._engine.health()

    def close(self) -> None:
        """Close this process's connections; the first one unloads the adapters."""
        self._engine.close()

    def _by_first(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """What the first process's work gives, or its error, in all of them."""
        said: dict[str, str] = {}
        if self._is_first:
            try:
                said = work()
            except RolloutError as error:
                said = {"error": str(error)}
        said = _from_first(said)
        if "error" in said:
            raise RolloutError(said["error"])
        return said


def _from_first(said: dict[str, str]) -> dict[str, str]:
    """The first process's message, in all of them; as JSON, for nothing is ever unpickled."""
    content = json.dumps(said).encode()
    device = _device()
    size = torch.tensor([len(content)], device=device)
    distributed.broadcast(size, 0)
    message = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if distributed.get_rank() == 0:
        message.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    distributed.broadcast(message, 0)
    received: dict[str, str] = json.loads(bytes(message.tolist()))
    return received


def _sum(value: int) -> int:
    """Over all processes."""
    total = torch.tensor([value], device=_device())
    distributed.all_reduce(total)
    return int(total)


def _device() -> torch.device:
    """Where collectives take tensors from."""
    on_gpu = "nccl" in distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
