"""Time and memory of a call, on a GPU or on the CPU."""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Larger than the second-level cache of any GPU of today: written between two timed calls.
FLUSH_BYTES = 256 * 1024 * 1024

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of the rounds, in seconds."""

    median_s: float
    first_quartile_s: float
    third_quartile_s: float


def _cuda_seconds(call: Call, flush: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _cpu_seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleaved(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Time every call once a round, so that a drift of the machine meets all of them.

    Args:
        calls: what to time, by name; each was run before, so that nothing compiles now.
        device: where they run. On a GPU device events are read and the cache is flushed before
            each call; on the CPU the wall clock is read.
        rounds: timed runs of each call, after one untimed round.
    """
    on_gpu = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES if on_gpu else 0, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            elapsed = _cuda_seconds(call, flush) if on_gpu else _cpu_seconds(call)
            if index:
                seconds[name].append(elapsed)
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(seconds: list[float]) -> Timing:
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0])
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(statistics.median(seconds), first, third)


class _StorageMeter(TorchDispatchMode):
    """Adds up the storages that torch operations made and nobody freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self.alive.values()))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key and key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory the call held beyond what was held before, its result included.

    On a GPU from torch's allocator; on the CPU the storages torch operations make are counted
    (scratch memory inside an operation is not seen).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _StorageMeter() as meter:
        call()
    return meter.peak
