"""The frozen trunk spread over ranks, layer by layer, and gathered where a layer needs it.

Each rank keeps an equal byte range of every unit (the embedding, a decoder layer). A unit's
forward gathers the whole range into a new buffer, lets the modules see it, and forgets it at its
end. Nothing counts uses: a buffer lives as long as a running forward, the prefetch, or a tensor
that autograd saved needs it. Under activation checkpointing the first forward saves nothing, so the
buffer goes at once; the recompute gathers again, and autograd frees that buffer once the layer's
backward is over. Without checkpointing all is right too, and every layer stays until its backward.

The weights are no parameters meanwhile: training engines, PEFT and the optimizer see the adapter
alone. All ranks of a group must run the same units in the same order, as under expert parallelism;
one that fails alone leaves the others waiting (a recipe then ends them).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3tune.parallel.trunk_layout import check_not_shared, unit_weights
from k3tune.parallel.trunk_unit import Gather, TrunkError, Unit


class TrunkCounts(NamedTuple):
    """What gathering took since the last look.

    Attributes:
        gathers: units gathered for use.
        prefetched: those whose gather had begun before they were asked for.
        received_bytes: that came from other ranks, wrong guesses of the prefetch included.
    """

    gathers: int
    prefetched: int
    received_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the gathers that were prefetched; 1 where there was none."""
        return self.prefetched / self.gathers if self.gathers else 1.0


class TrunkShards:
    """The sharded units of a model; made once, it works through hooks on them from then on.

    Attributes:
        units: name -> unit, in the order the forward runs them.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Take the frozen weights of ``units`` out of their modules.

        Args:
            model: holds all units.
            units: name and module, in the order the forward runs them; on the meta device, or with
                the whole weights, which are freed unit by unit.
            group: the ranks to spread over, the same on all of them; None keeps all here.
            device: where shards and gathered weights lie.

        Raises:
            ConfigError: if a weight is to be trained, or is shared between units.
        """
        weights = [unit_weights(name, module) for name, module in units]
        check_not_shared(model, [weight for unit in weights for weight in unit])
        self.units: dict[str, Unit] = {}
        self._numbers: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._pending: tuple[int, Gather] | None = None
        self._last = -1
        self._gathers = self._hits = self._received = 0
        self._apart = torch.zeros(1, dtype=torch.bool, device=device)
        # taken off one by one: weights that hold data are freed once their unit is spread
        weights.reverse()
        for number, (name, module) in enumerate(units):
            self.units[name] = Unit(name, number, weights.pop(), group, device)
            self._numbers[name] = number
            self._attach(number, module)
        self._ordered = list(self.units.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of all shards on this rank."""
        return sum(unit.layout.part_bytes for unit in self._ordered)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all units together, which a forward gathers one by one."""
        return sum(unit.layout.full_bytes for unit in self._ordered)

    @contextmanager
    def opened(self, name: str) -> Iterator[None]:
        """A unit's weights, for code that reads them without calling the unit.

        Every rank of the group must open the same units in the same order.

        Args:
            name: of a unit, such as ``"model.layers.0"``.
        """
        with self._opened(self._numbers[name]):
            yield

    def take_counts(self) -> TrunkCounts:
        """Counts since the last call.

        Raises:
            TrunkError: if ranks of the group gathered different units.
        """
        self._check_together()
        taken = TrunkCounts(self._gathers, self._hits, self._received)
        self._gathers = self._hits = self._received = 0
        return taken

    def drop_prefetch(self) -> None:
        """Free the unit that was gathered ahead, before a long pause or at the end."""
        if self._pending is not None:
            self._finish(*self._pending)
            self._pending = None

    def keep_stepping(self, works: bool) -> bool:
        """Whether any process of the job has work left, asked by all of them before a forward.

        While one has, the others must run a forward too: it would wait for their parts.

        Args:
            works: whether this process has work.
        """
        if not dist.is_available() or not dist.is_initialized():
            return works
        flag = torch.tensor(int(works), device=self._apart.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _attach(self, number: int, module: nn.Module) -> None:
        def before(module: nn.Module, _: Any) -> None:
            self._enter(number)
            _gather_in_recompute(self, number, module)

        def after(*_: Any) -> None:
            self._leave(number)

        module.register_forward_pre_hook(before, prepend=True)
        # always: a forward that raises leaves too, as the early stop of a recompute does
        module.register_forward_hook(after, always_call=True)

    @contextmanager
    def _opened(self, number: int) -> Iterator[None]:
        self._enter(number)
        try:
            yield
        finally:
            self._leave(number)

    def _enter(self, number: int) -> None:
        if number not in self._open:
            self._gather(number)
        self._open[number] = self._open.get(number, 0) + 1

    def _leave(self, number: int) -> None:
        # a hook before ours may have raised before the unit was entered
        depth = self._open.pop(number, 0)
        if depth > 1:
            self._open[number] = depth - 1
        elif depth == 1:
            self._ordered[number].hide()

    def _gather(self, number: int) -> None:
        ahead, self._pending = self._pending, None
        hit = ahead is not None and ahead[0] == number
        if ahead is not None and not hit:
            # a wrong guess: its buffer may go only once it is filled
            self._finish(*ahead)
        gather = ahead[1] if ahead is not None and hit else self._ordered[number].gather()
        following = self._following(number)
        if following is not None:
            self._pending = (following, self._ordered[following].gather())
        unit, buffer = self._ordered[number], self._finish(number, gather)
        self._gathers, self._hits = self._gathers + 1, self._hits + hit
        self._apart |= unit.tag(buffer) != number
        if buffer.device.type == "cpu":
            # elsewhere the look would wait for the device: take_counts does it
            self._check_together()
        unit.show(buffer)

    def _finish(self, number: int, gather: Gather) -> Tensor:
        layout = self._ordered[number].layout
        self._received += layout.full_bytes - layout.part_bytes
        return gather.wait()

    def _following(self, number: int) -> int | None:
        """The unit that comes next: the one after this or, in a backward, the one before."""
        last, self._last, end = self._last, number, len(self._ordered) - 1
        backwards = last == number + 1 or last == number == end
        following = number - 1 if backwards and number else number + 1
        return following if following <= end else None

    def _check_together(self) -> None:
        if bool(self._apart):
            raise TrunkError(
                "processes of a trunk group gathered different layers, expected the same in the "
                "same order: run as many forwards, of the same kind, on each of them (generation "
                "with synced_gpus=True)"
            )


class _GatheringCheckpoint:
    """A layer's checkpoint function whose recompute gathers the layer's weights again."""

    def __init__(self, shards: TrunkShards, number: int, checkpoint: Callable[..., Any]) -> None:
        self.shards, self.number, self.checkpoint = shards, number, checkpoint

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def gathered(*args: Any) -> Any:
            with self.shards._opened(self.number):
                return forward(*args)

        return self.checkpoint(gathered, *args, **kwargs)


def _gather_in_recompute(shards: TrunkShards, number: int, module: nn.Module) -> None:
    """Reach the recompute of transformers' layers.

    They checkpoint their forward and not their call, so that no hook of the layer runs in it. The
    function is set when checkpointing is switched on, which may be any time before a forward.
    """
    checkpoint = vars(module).get("_gradient_checkpointing_func")
    if checkpoint is not None and not isinstance(checkpoint, _GatheringCheckpoint):
        replaced = _GatheringCheckpoint(shards, number, checkpoint)
        vars(module)["_gradient_checkpointing_func"] = replaced
