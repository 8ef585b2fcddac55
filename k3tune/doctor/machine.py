"""The doctor's eyes: files under ``/proc`` and ``/sys``, and programs asked with a time limit."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A driver that hangs makes nvidia-smi hang with it; a healthy one answers in 1 to 2 s.
TIMEOUT_S = 4.0


class Answer(NamedTuple):
    """What a program printed, or why there is no answer; both None if it is not installed."""

    output: str | None
    problem: str | None


def ask(command: Sequence[str]) -> Answer:
    """Run a program, at most :data:`TIMEOUT_S` seconds."""
    if shutil.which(command[0]) is None:
        return Answer(None, None)
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"it did not answer within {TIMEOUT_S:.0f} s")
    except OSError as error:
        return Answer(None, f"it cannot be run: {error.strerror}")
    if result.returncode:
        said = (result.stderr or result.stdout).strip().splitlines()
        return Answer(
            None,
            f"it ended with status {result.returncode}{': ' if said else ''}{''.join(said[:1])}",
        )
    return Answer(result.stdout, None)


@dataclass(frozen=True)
class Machine:
    """This machine, or a picture of one.

    Attributes:
        root: folder under which ``/proc`` and ``/sys`` are read.
        ask: runs a program.
    """

    root: Path = Path("/")
    ask: Callable[[Sequence[str]], Answer] = ask

    def read(self, path: str | Path) -> str | None:
        """Text of a file without the space around it; None where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        # some files of /sys are there and answer EINVAL
        except OSError:
            return None

    def paths(self, pattern: str) -> list[Path]:
        """Paths under the root that match, in order."""
        return sorted(self.root.glob(pattern))

    def properties(self, path: str | Path) -> dict[str, int]:
        """A file of lines ``name number``, as the amdgpu driver's topology writes."""
        words = (line.split() for line in (self.read(path) or "").splitlines())
        return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}
