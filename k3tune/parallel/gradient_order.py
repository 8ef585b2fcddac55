"""Whether gradients become ready in one order on all processes.

ZeRO-2 adds gradients up bucket by bucket, in the order in which each process's backward has them
ready. A process whose order is another one adds its gradients to those of other parameters, and
takes theirs for its own, without a word.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3tune.errors import K3TuneError


def largest_of_all(values: Tensor) -> Tensor:
    """The largest value at each place over all processes; every one must ask."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


class GradientOrder:
    """Notes the order of each step's gradients, and compares it with the other processes'."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        largest: Callable[[Tensor], Tensor] = largest_of_all,
    ) -> None:
        """Note from now on.

        Args:
            parameters: that train, by name, alike on every process.
            device: where the processes exchange a number.
            largest: see :func:`largest_of_all`.
        """
        self._names = list(parameters)
        self._device, self._largest = device, largest
        self._ready: list[int] = []
        for place, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._note, place))

    def check(self) -> None:
        """Compare what became ready since the last call; every process must ask.

        Raises:
            K3TuneError: on every process, if the order is not the same on all.
        """
        ready, self._ready = self._ready, []
        if not ready:
            return
        digest = hashlib.sha256(repr(ready).encode()).digest()
        # below half of int64, so that its negative is one too
        number = int.from_bytes(digest[:7], "little")
        highest, lowest = self._largest(
            torch.tensor([number, -number], dtype=torch.int64, device=self._device)
        ).tolist()
        if highest != -lowest:
            first = ", ".join(self._names[place] for place in ready[:3])
            raise K3TuneError(
                f"gradients became ready in different orders on the processes (here first {first}),"
                " expected one order: ZeRO-2 would add up those of different factors; set "
                "zero_stage to 1, which waits for all of them, and report it"
            )

    def _note(self, place: int, _: Tensor) -> None:
        self._ready.append(place)
