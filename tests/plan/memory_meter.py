"""What PyTorch's CPU allocator hands out while something runs: the peak, as a profiler sees it.

Resident memory would count the interpreter and freed pages too, and be larger than all of a tiny
model.
"""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_above_start(run: Callable[[], Any]) -> int:
    """Most bytes that were allocated at once during ``run``, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert events, "the profiler saw no allocation"
    held = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak
