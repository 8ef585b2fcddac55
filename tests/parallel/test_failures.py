"""One process's failure reaches the others, and so does its silence."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from k3tune.parallel.failures import FailureWatch, failures_end_job


class Process:
    """A watch with a connection of its own, and what it was told."""

    def __init__(self, port: int, rank: int, *, world: int = 3, **limits: float) -> None:
        timeout = timedelta(seconds=10)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        self.told: str | None = None
        self._told = threading.Event()
        self.watch = FailureWatch(
            store, rank, world, end=self._tell, **{"interval_s": 0.05, "silence_s": 30, **limits}
        )

    def _tell(self, message: str) -> None:
        self.told = message
        self._told.set()

    def hears(self) -> bool:
        return self._told.wait(20)


@pytest.fixture
def port():
    """Of the job's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_all_hear_the_error_of_the_first_that_fails(port):
    processes = [Process(port, rank) for rank in range(3)]
    processes[1].watch.report(ValueError("no such file"))
    processes[2].hears()
    processes[2].watch.report(RuntimeError("connection closed"))
    assert processes[0].hears()
    assert processes[0].told == "process 1 failed: ValueError: no such file"
    assert processes[2].told == processes[0].told
    assert processes[1].told is None


def test_a_process_that_falls_silent_is_named(port):
    processes = [Process(port, rank, silence_s=1) for rank in range(3)]
    time.sleep(0.3)
    # killed: it says nothing any more
    processes[2].watch._closing.set()
    for rank in (0, 1):
        assert processes[rank].hears()
        assert "process 2 was not heard of for 1 s" in processes[rank].told


def test_a_process_that_is_done_may_be_silent(port):
    # on a busy machine a thread that lives may well be silent for half a second
    processes = [Process(port, rank, silence_s=1) for rank in range(3)]
    time.sleep(0.2)
    for process in processes[:2]:
        process.watch.close()
    time.sleep(1.5)
    processes[2].watch.close()
    assert [process.told for process in processes] == [None] * 3


def test_a_single_process_is_not_watched(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"), failures_end_job():
        assert threading.active_count() == before
        raise ValueError("mine")
