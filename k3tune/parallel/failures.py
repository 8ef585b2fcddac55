"""A process that fails, or is killed, ends the whole job soon, and every process says which.

A collective waits for a lost process for half an hour, and a launcher only watches its own machine.
So each process tells the job's store once a second that it lives, and looks after the next one.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
SILENCE_S = 40.0
"""Longest silence of a process that lives: some calls into C hold Python for many seconds."""
_FAILED = "k3tune/failed"
_DONE = "done"
_LONGEST_MESSAGE = 2000
_CONNECT_S = 60


class FailureWatch:
    """One process's part: tells that it lives, looks after its neighbour, ends with the others."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        interval_s: float = INTERVAL_S,
        silence_s: float = SILENCE_S,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            store: the job's, on a connection of its own.
            rank, world: place and number of processes.
            interval_s, silence_s: seconds between signs of life, and until one counts as lost.
            end: called with a sentence when another process failed; default: end this one.
        """
        self._store, self._rank = store, rank
        self._neighbour = (rank + 1) % world
        self._interval_s, self._silence_s = interval_s, silence_s
        self._end = end or _end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure watch")
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the others that this process failed; the first to fail is heard, here too."""
        self._closing.set()
        self._thread.join()
        own = f"process {self._rank} failed: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        first = self._say(own)
        if first != own:
            # most likely a collective of this process broke when the other went
            sys.stderr.write(f"error: {first}\n")

    def close(self) -> None:
        """This process is done; its silence means nothing from now on."""
        self._closing.set()
        self._thread.join()
        try:
            self._store.set(_beat(self._rank), _DONE)
        except RuntimeError as error:
            # whoever held the store is done as well
            logger.debug("the job's store is gone: %s", error)

    def _watch(self) -> None:
        count, last_seen = 0, b""
        heard_s = reached_s = time.monotonic()
        while not self._closing.wait(self._interval_s):
            now_s = time.monotonic()
            count += 1
            try:
                self._store.set(_beat(self._rank), str(count))
                failed = self._store.check([_FAILED])
                message = self._store.get(_FAILED).decode() if failed else None
                started = self._store.check([_beat(self._neighbour)])
                seen = self._store.get(_beat(self._neighbour)) if started else b""
                reached_s = now_s
            except RuntimeError as error:
                if now_s - reached_s > self._silence_s:
                    self._end(f"the job's store did not answer for {self._silence_s:g} s: {error}")
                    return
                continue
            if message is not None:
                self._end(message)
                return
            if seen != last_seen or seen in (b"", _DONE.encode()):
                last_seen, heard_s = seen, now_s
            elif now_s - heard_s > self._silence_s:
                self._say(
                    f"process {self._neighbour} was not heard of for {self._silence_s:g} s: it was "
                    "killed, or its machine is gone"
                )

    def _say(self, message: str) -> str:
        """What the job is told: this message, or the one of a process that came first."""
        try:
            return self._store.compare_set(_FAILED, "", message).decode()
        except RuntimeError as error:
            logger.debug("the job's store is gone: %s", error)
            return message


@contextmanager
def failures_end_job() -> Iterator[None]:
    """A block in which the failure of one process ends all of them; nothing for a single one.

    The watch starts by itself once torch.distributed has.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
        yield
        return
    starter = _Starter()
    try:
        yield
    except BaseException as error:
        if watch := starter.stop():
            watch.report(error)
        raise
    if watch := starter.stop():
        watch.close()


class _Starter:
    """Waits for torch.distributed, whose store it then connects to."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._watch: FailureWatch | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True, name="failure watch start")
        self._thread.start()

    def stop(self) -> FailureWatch | None:
        """The watch, if it came to start."""
        self._stopped.set()
        self._thread.join()
        return self._watch

    def _wait(self) -> None:
        stopped = False
        while not dist.is_initialized():
            if stopped:
                return
            stopped = self._stopped.wait(INTERVAL_S)
        address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "0")
        try:
            store = dist.TCPStore(
                address,
                int(port),
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            logger.warning(
                "the job's store at %s:%s cannot be reached: a process lost on another machine "
                "ends this one only when a collective gives up (%s)",
                address,
                port,
                error,
            )
            return
        self._watch = FailureWatch(store, dist.get_rank(), dist.get_world_size())


def _beat(rank: int) -> str:
    return f"k3tune/alive/{rank}"


def _end(message: str) -> None:
    """A thread cannot raise in another, and a collective would not let go: leave at once."""
    sys.stderr.write(f"error: {message}; this process stops, the last checkpoint goes on\n")
    sys.stderr.flush()
    os._exit(1)
