"""What a step's record holds beside the loss: times, tokens, router load, gradient norms, memory.

Shape letters: ``L`` MoE layers, ``E`` experts, ``B`` batch, ``T`` tokens, ``A`` active experts.
"""

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce

from k3tune.model.backbone import K3Model, K3ModelOutput
from k3tune.parallel.router_counts import RouterCounts
from k3tune.train.optimizer_state import group_label

PHASES = ("data", "forward_backward", "optimizer")


class StepClock:
    """Seconds of a step's phases; a GPU is waited for at every edge."""

    def __init__(self, device: torch.device, phases: tuple[str, ...] = PHASES) -> None:
        self._device = device
        self._phases = phases
        self._running: tuple[str, float] | None = None
        self.seconds = dict.fromkeys(phases, 0.0)
        self.steps = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as part of a phase, which ends the phase that runs."""
        self.start(name)
        try:
            yield
        finally:
            self.stop()

    def start(self, name: str) -> None:
        """Begin a phase, ending the one that runs."""
        self.stop()
        self._running = (name, self._now())

    def stop(self) -> None:
        """End the phase that runs, if one does."""
        if self._running is not None:
            name, begun = self._running
            self.seconds[name] += self._now() - begun
            self._running = None

    def end_step(self) -> None:
        """End the phase that runs, and count a step."""
        self.stop()
        self.steps += 1

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds by phase and steps since the last call."""
        taken = self.seconds, self.steps
        self.seconds, self.steps = dict.fromkeys(self._phases, 0.0), 0
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class RouterLoad:
    """Counts tokens by expert from the routing that the training forward computes anyway.

    It hangs on the backbone's call, which activation checkpointing does not repeat; padding and
    evaluation are not counted.
    """

    def __init__(self, backbone: K3Model) -> None:
        self._layers = tuple(backbone.architecture.moe_layers)
        self._num_experts = backbone.architecture.num_experts
        self._counts_LE: Tensor | None = None
        self._taken_LE = torch.zeros(len(self._layers), self._num_experts, dtype=torch.int64)
        self._hooks = (
            backbone.register_forward_pre_hook(self._ask, with_kwargs=True),
            backbone.register_forward_hook(self._count, with_kwargs=True),
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> dict[int, float]:
        """By zero-based layer, the busiest expert's tokens over the mean, since the last call.

        Every process must call it: counts are summed over all of them.
        """
        if self._counts_LE is None:
            return {}
        counts_LE = sum_over_processes(self._counts_LE)
        self._counts_LE = None
        self._taken_LE += counts_LE.cpu()
        mean_L = counts_LE.double().mean(dim=1)
        load_L = counts_LE.amax(dim=1) / mean_L
        return dict(zip(self._layers, load_L.tolist(), strict=True))

    def counts(self) -> RouterCounts | None:
        """What was taken so far, of all processes; None where nothing was."""
        if not self._taken_LE.any():
            return None
        rows = zip(self._layers, self._taken_LE.numpy(), strict=True)
        return RouterCounts(self._num_experts, {layer: row.copy() for layer, row in rows})

    def _ask(
        self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_routing": kwargs.get("output_routing") or backbone.training}

    def _count(
        self,
        backbone: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: K3ModelOutput,
    ) -> None:
        if not backbone.training or output.routing is None:
            return
        mask_BT = kwargs.get("attention_mask")
        for place, layer in enumerate(self._layers):
            ids_BTA = output.routing[layer].expert_ids
            if self._counts_LE is None:
                shape = (len(self._layers), self._num_experts)
                self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=ids_BTA.device)
            ones_BTA = torch.ones_like(ids_BTA)
            if mask_BT is not None:
                ones_BTA *= (mask_BT != 0).unsqueeze(-1)
            self._counts_LE[place].scatter_add_(0, ids_BTA.flatten(), ones_BTA.flatten())


class GradientNorms:
    """Norm of the gradient by optimizer group, taken as the optimizer steps.

    There the gradient is averaged over processes and clipped, and under ZeRO only this process's
    partition exists. :meth:`take` undoes the clipping with the norm from before it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, partitioned: bool) -> None:
        self._partitioned = partitioned
        # by label and first parameter: a target group may be several of the optimizer's
        self._squares: dict[tuple[str, int], Tensor] = {}
        optimizer.register_step_pre_hook(self._measure)

    def take(self, total: float | None) -> dict[str, float]:
        """Norms of the last step by group, scaled so that together they are ``total``.

        Every process must call it.
        """
        if not self._squares:
            return {}
        squares = torch.stack(list(self._squares.values()))
        if self._partitioned:
            squares = sum_over_processes(squares)
        whole = squares.sum().sqrt().item()
        scale = total / whole if total is not None and whole > 0 else 1.0
        by_label: Counter[str] = Counter()
        for (label, _), square in zip(self._squares, squares.tolist(), strict=True):
            by_label[label] += square
        return {label: math.sqrt(square) * scale for label, square in by_label.items()}

    def _measure(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if gradients:
                norms = torch.stack(torch._foreach_norm(gradients))
                key = group_label(group), id(group["params"][0])
                self._squares[key] = norms.double().square().sum()


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes; the tensor itself for one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        tensor = tensor.clone()
        all_reduce(tensor, op=ReduceOp.SUM)
    return tensor


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes this process has held: allocated on a GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flat(prefix: str, values: Mapping[Any, float]) -> dict[str, float]:
    """``{"a": 1}`` as ``{"prefix/a": 1}``, the form trackers group by."""
    return {f"{prefix}/{key}": value for key, value in values.items()}
