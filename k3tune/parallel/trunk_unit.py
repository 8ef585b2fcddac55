"""One unit of a sharded trunk: the part a rank keeps, its gather, and what the modules show."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3tune.errors import K3TuneError
from k3tune.parallel.trunk_bytes import TAG_BYTES
from k3tune.parallel.trunk_layout import Owner, Slot, lay_out

# What may be asked of a weight that is not there; "__get__" is every property (shape, dtype, ...).
_DESCRIBING = frozenset(
    "__get__ size dim ndimension numel element_size is_floating_point is_complex __len__".split()
)


class TrunkError(K3TuneError):
    """A weight of a sharded trunk was used where it is not gathered, or ranks went apart."""


class AbsentWeight(Tensor):
    """What a sharded weight shows while it is not gathered: shape, dtype and device.

    Any other use is an error. A value in its place (NaN, zeros, meta) could pass through a
    trainer unnoticed.
    """

    @classmethod
    def of(cls, slot: Slot, device: torch.device) -> Self:
        """The stand-in of a weight; one element of memory."""
        one = torch.empty(1, dtype=slot.dtype, device=device)
        return one.expand(slot.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TrunkError(
            f"{name} on a sharded weight outside its layer, where only shape, dtype and device are "
            "there: call the layer, or read the weight inside sharded_trunk(model).opened(layer), "
            "on all processes of the trunk group"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AbsentWeight({tuple(self.shape)}, {self.dtype}, {self.device})"


class Gather(NamedTuple):
    """A unit's bytes on their way: the buffer, and what to wait for (None: they are there)."""

    buffer: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The buffer, once it is filled."""
        if self.work is not None:
            self.work.wait()
        return self.buffer


class Unit:
    """The weights of one module, of which this rank keeps one part.

    Attributes:
        name: of the module in the base.
        layout: of its bytes.
        shard: the part, uint8 ``[part_bytes]``.
    """

    def __init__(
        self,
        name: str,
        number: int,
        weights: list[tuple[str, nn.Parameter, tuple[Owner, ...]]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Take the weights out of their modules; those that hold data leave this rank's part here.

        Args:
            name, number: of the unit.
            weights: from :func:`~k3tune.parallel.trunk_layout.unit_weights`.
            group: of the ranks the unit is spread over; None is this process alone.
            device: where the part goes, and the gathered bytes will.
        """
        self.name, self.group = name, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.layout = lay_out(weights, 1 if group is None else dist.get_world_size(group))
        self.shard = torch.zeros(self.layout.part_bytes, dtype=torch.uint8, device=device)
        if self.rank == self.layout.ranks - 1:
            self._tag_of(self.shard).fill_(number)
        for slot, weight, piece in zip(self.layout.slots, weights, self.pieces(), strict=True):
            if piece is not None and not weight[1].is_meta:
                start, values = piece
                values.copy_(weight[1].detach().reshape(-1)[start : start + len(values)])
            for module, attribute in slot.owners:
                # stays a name of the module, as a bias that is None does; .to() and others skip it
                module._parameters[attribute] = None
        self._absent = [AbsentWeight.of(slot, device) for slot in self.layout.slots]
        self._show(self._absent)

    def pieces(self) -> Iterator[tuple[int, Tensor] | None]:
        """Of each weight, in order, the elements kept here: the first one, and where they lie.

        The values are flat views into :attr:`shard`; None where other ranks keep every byte.
        """
        first = self.rank * self.layout.part_bytes
        for slot in self.layout.slots:
            kept = self.layout.kept(slot, self.rank)
            if kept is None:
                yield None
                continue
            begin, end = (slot.offset + byte - first for byte in kept)
            yield kept[0] // slot.dtype.itemsize, self.shard[begin:end].view(slot.dtype)

    def gather(self) -> Gather:
        """Begin to collect all parts into a new buffer; every rank of the group must.

        The buffer is new each time: autograd may still hold the last one, and frees it when the
        layer's backward is done.
        """
        if self.group is None:
            return Gather(self.shard, None)
        buffer = torch.empty(self.layout.full_bytes, dtype=torch.uint8, device=self.shard.device)
        work = dist.all_gather_single(buffer, self.shard, group=self.group, async_op=True)
        return Gather(buffer, work)

    def show(self, buffer: Tensor) -> None:
        """Let the modules see the weights in a gathered buffer."""
        weights = []
        for slot in self.layout.slots:
            content = buffer[slot.offset : slot.offset + slot.size_bytes]
            weights.append(content.view(slot.dtype).view(slot.shape))
        self._show(weights)

    def hide(self) -> None:
        """Forget the buffer."""
        self._show(self._absent)

    def tag(self, buffer: Tensor) -> Tensor:
        """Number of the unit that the last rank sent, int64 ``[1]``."""
        return self._tag_of(buffer)

    def _tag_of(self, content: Tensor) -> Tensor:
        return content[-TAG_BYTES:].view(torch.int64)

    def _show(self, tensors: list[Any]) -> None:
        for slot, tensor in zip(self.layout.slots, tensors, strict=True):
            for module, attribute in slot.owners:
                # a plain attribute, neither parameter nor buffer: casts, broadcasts and
                # checkpoints of a training engine pass it by
                module.__dict__[attribute] = tensor
