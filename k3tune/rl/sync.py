"""The adapter's way into the engine: every push has a number, and must have changed something."""

from typing import Any

import torch
from torch import Tensor

from k3tune.errors import RolloutError
from k3tune.lora import adapter_state
from k3tune.lora.inject import DEFAULT_ADAPTER
from k3tune.lora.watch import checksum
from k3tune.parallel.expert_parallel import expert_parallel_of
from k3tune.parallel.gather import FactorRows
from k3tune.rl.rollout import RolloutEngine


class AdapterSync:
    """Pushes a model's adapter and knows which version is live.

    Attributes:
        version: of the last push; 0 is the base with B = 0.
        num_unchanged: pushes in which nothing changed though something had to.
    """

    def __init__(self, engine: RolloutEngine, model: Any, *, count_unchanged: bool) -> None:
        """Nothing is pushed yet.

        Args:
            engine: at any version.
            model: with the adapter.
            count_unchanged: count such pushes instead of an error.
        """
        health = engine.health()
        parallel = expert_parallel_of(model)
        self._rows: FactorRows | None = None
        if parallel is not None and health.numerics.get("engine") != "local":
            # servers take an adapter whole, the local engine the factors of its own experts
            self._rows = FactorRows(parallel, model, DEFAULT_ADAPTER)
        self.version = health.adapter_version
        self.num_unchanged = 0
        self._engine = engine
        self._model = model
        self._count_unchanged = count_unchanged
        self._checksums: dict[str, Tensor] | None = None

    def push(self, *, moved: bool, at_least: int = 0) -> None:
        """Make the adapter as it is the live one, under the next version.

        Args:
            moved: whether it must differ from the last push: the step had a gradient and a
                learning rate.
            at_least: version to begin again from, for a resumed run.

        Raises:
            RolloutError: if nothing changed that had to, or the engine does not have the version
                live afterwards.
        """
        tensors = adapter_state(self._model)
        checksums = {key: checksum(tensor, 1) for key, tensor in tensors.items()}
        before, self._checksums = self._checksums, checksums
        if moved and before is not None:
            self._check_changed(before, checksums)
        version = max(self.version + 1, at_least)
        self._engine.load_adapter(version, self._to_push(tensors))
        live = self._engine.health().adapter_version
        if live != version:
            raise RolloutError(
                f"adapter version {version} was pushed and the engine has {live} live: see its "
                "log, or restart it"
            )
        self.version = version

    def push_zero(self) -> None:
        """Make the base live: the adapter with B = 0, for an engine that had another one before."""
        tensors = {
            key: torch.zeros_like(tensor) if "lora_B" in key else tensor
            for key, tensor in self._to_push(adapter_state(self._model)).items()
        }
        self.version += 1
        self._engine.load_adapter(self.version, tensors)

    def _to_push(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of this process's factors: what the engine takes; nothing where another one pushes."""
        return own if self._rows is None else self._rows.whole_state()

    def _check_changed(self, before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
        if any(not torch.equal(now[key], before[key]) for key in now):
            return
        self.num_unchanged += 1
        if not self._count_unchanged:
            raise RolloutError(
                f"none of the {len(now)} tensors to push as adapter version {self.version + 1} "
                "differs from the version before, though the step had a gradient: expected the "
                "optimizer to have moved them; are they the parameters it steps over? (set "
                "on_unchanged_push to count to go on)"
            )
