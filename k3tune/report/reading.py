"""A run's files, read once and leanly; whatever is damaged is skipped, counted and said.

A long log is half a gigabyte. What the report needs of it fits into some megabytes: the numbers of
all records as columns, the distributions of the last records, and the records of the worst tokens.
"""

import heapq
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from k3tune.errors import K3TuneError
from k3tune.report.table import Columns, RecordTable
from k3tune.run_log import FILE_NAME, SCHEMA

WINDOW = 50
"""Records that stand for "now": distributions and the headline are taken over them."""

WORST_STEPS = 20
"""Steps whose worst tokens are kept, by the largest |r| in them."""

_LAYER_COLUMNS = 256
# A step beyond is damage, and no axis could show it.
_STEPS = 10**12
_TEXTS = ("verdict", "attribution", "attribution_text", "canary_verdict")
_DISTRIBUTIONS = ("histogram", "scatter", "by_probability", "by_position", "by_length")
_CANARY = ("verdict", "engine_moved", "trainer_moved", "difference")
MISMATCH_FIELDS = (
    *("k3", "k3_token_mean", "excess_ratio", "abs_mean", "abs_p95", "abs_max"),
    *("ewma", "ewma_limit", "cusum", "cusum_limit"),
    *("is_mean", "is_min", "is_max", "is_out_of_bounds", "ess", "ess_sequence"),
    *("masked_fraction", "truncated_fraction", "num_tokens", "nan_count"),
    *("adapter_version", "version_lag", "stale_samples"),
    *("router_mismatch", "router_mismatch_tokens"),
    *(f"canary_{name}" for name in _CANARY[1:]),
)
"""Numbers of a mismatch record that the report uses; ``canary_*`` are those of its canary."""
_BEGINNING = b'{"schema":'
# A record as RunLogWriter writes it: its kind is known without parsing the rest.
_WORST = re.compile(rb'\{"schema": ?1, ?"kind": ?"worst", ?"time": ?[-+.\de]+, ?"step": ?(\d+),')


@dataclass
class Run:
    """What a run's files say.

    Attributes:
        path: the log.
        starts: ``run`` records, one a process group.
        train, evals, mismatch: columns of the records of these kinds.
        distributions: of the last :data:`WINDOW` mismatch records: the fields that are lists.
        router_layers: ``(step, router_mismatch_layers)``, evenly thinned.
        floor: the last floor record, or what the run's folder holds of one.
        worst: records of worst tokens, those with the largest |r| and the last one, by step.
        alarms: ``alarm`` records.
        end: the record that ended the run; None while it goes on, or when it crashed.
        config: options of the run; empty without a config file.
        notes: what is to be said about the files, in sentences.
        last_time: of the last record, seconds since 1970.
    """

    path: Path
    starts: list[dict[str, Any]] = field(default_factory=list)
    train: Columns = field(default_factory=lambda: RecordTable().freeze())
    evals: Columns = field(default_factory=lambda: RecordTable().freeze())
    mismatch: Columns = field(default_factory=lambda: RecordTable().freeze())
    distributions: list[dict[str, Any]] = field(default_factory=list)
    router_layers: list[tuple[int, list[Any]]] = field(default_factory=list)
    floor: dict[str, Any] | None = None
    worst: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    last_time: float | None = None


def read_run(path: str | Path) -> Run:
    """Read a run that ended, goes on or crashed.

    Args:
        path: its folder, or its log.

    Raises:
        K3TuneError: if there is no log, or it is none of this version.
    """
    path, config, floor = files_of_run(path)
    reader = _Reader()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                reader.take(line, number)
    except OSError as error:
        raise K3TuneError(
            f"cannot read the run log {path}: {error.strerror}: name a run's output_dir"
        ) from error
    run = reader.finish(path)
    run.config = _read_config(config, run.notes)
    if run.floor is None and len(run.mismatch):
        run.floor = _read_floor(floor, run.notes)
    return run


def files_of_run(path: str | Path) -> tuple[Path, Path, Path]:
    """The files :func:`read_run` reads: log, options and floor.

    Args:
        path: a run's folder, or its log.
    """
    path = Path(path)
    if path.is_dir():
        path /= FILE_NAME
    return path, path.with_name("config.yaml"), path.with_name("floor.json")


def status(run: Run, now: float | None = None) -> tuple[str, str]:
    """Whether the run goes on, in a word and a sentence.

    Returns:
        ``finished``, ``terminated``, ``running``, ``stopped`` (no end record, and silent for
        longer than its steps take) or ``empty``.
    """
    if run.end is not None:
        reason = run.end.get("reason")
        if reason == "terminated":
            return "terminated", "stopped by a signal, with a checkpoint"
        return "finished", "finished"
    if run.last_time is None:
        return "empty", "nothing logged yet"
    silent_s = (time.time() if now is None else now) - run.last_time
    times = run.train["time"][-WINDOW:]
    pace_s = float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else 0.0
    ago = _ago(silent_s)
    if silent_s > max(600.0, 20 * pace_s):
        return "stopped", f"no end record, and silent for {ago}: crashed or killed"
    return "running", f"running, last record {ago} ago"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


class _Reader:
    """Takes lines, gives a :class:`Run`."""

    def __init__(self) -> None:
        self._run = Run(Path())
        self._tables = {
            "train": RecordTable(),
            "eval": RecordTable(),
            "mismatch": RecordTable(_TEXTS, MISMATCH_FIELDS),
        }
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._layers = _Thinned(_LAYER_COLUMNS)
        self._worst: list[tuple[float, int, bytes]] = []
        self._last_worst: tuple[float, int, bytes] | None = None
        self._abs_max = (-1, 0.0)
        self._records = self._damaged = self._foreign = 0
        self._first_damaged: int | None = None
        self._cut = self._no_record = False

    def take(self, line: bytes, number: int) -> None:
        """Read a line; ``number`` counts from 1."""
        if not line.endswith(b"\n"):
            self._cut = True
            # a record may be cut anywhere, what begins otherwise was never one
            self._no_record = not _BEGINNING.startswith(line[: len(_BEGINNING)])
            return
        if found := _WORST.match(line):
            self._records += 1
            self._take_worst(int(found[1]), line)
            return
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        kind, step = (
            (record.get("kind"), record.get("step")) if isinstance(record, dict) else (0, 0)
        )
        if not isinstance(kind, str) or type(step) is not int or not 0 <= step < _STEPS:
            self._damaged += 1
            self._first_damaged = self._first_damaged or number
        elif record.get("schema") != SCHEMA:
            self._foreign += 1
        else:
            self._records += 1
            if isinstance(record.get("time"), float | int):
                self._run.last_time = float(record["time"])
            self._sort_in(kind, step, record, line)

    def _sort_in(self, kind: str, step: int, record: dict[str, Any], line: bytes) -> None:
        if kind == "run":
            self._restart(step)
            self._run.starts.append(record)
        elif kind == "mismatch":
            self._take_mismatch(step, record)
        elif kind in self._tables:
            del record["schema"], record["kind"], record["step"]
            self._tables[kind].add(step, record)
        elif kind == "worst":
            self._take_worst(step, line)
        elif kind == "alarm":
            self._run.alarms.append(record)
        elif kind == "floor":
            self._run.floor = record
        elif kind == "end":
            self._run.end = record

    def _restart(self, step: int) -> None:
        """Forget later steps: a run that resumes does them again."""
        run = self._run
        for table in self._tables.values():
            table.drop_after(step)
        run.alarms = [record for record in run.alarms if record["step"] <= step]
        kept = [record for record in self._recent if record["step"] <= step]
        self._recent = deque(kept, maxlen=WINDOW)
        self._layers.drop_after(step)
        self._worst = [entry for entry in self._worst if entry[1] <= step]
        if self._last_worst and self._last_worst[1] > step:
            self._last_worst = None
        run.end = None

    def _take_mismatch(self, step: int, record: dict[str, Any]) -> None:
        kept = {name: record.get(name) for name in _DISTRIBUTIONS}
        kept["step"] = step
        self._recent.append(kept)
        layers = record.get("router_mismatch_layers")
        if isinstance(layers, list):
            self._layers.add(step, layers)
        canary = record.get("canary")
        if isinstance(canary, dict):
            for name in _CANARY:
                record[f"canary_{name}"] = canary.get(name)
        largest = record.get("abs_max")
        self._abs_max = (step, largest if isinstance(largest, float | int) else 0.0)
        self._tables["mismatch"].add(step, record)

    def _take_worst(self, step: int, line: bytes) -> None:
        largest = self._abs_max[1] if self._abs_max[0] == step else 0.0
        self._last_worst = (largest, step, line)
        if len(self._worst) < WORST_STEPS:
            heapq.heappush(self._worst, self._last_worst)
        else:
            heapq.heappushpop(self._worst, self._last_worst)

    def finish(self, path: Path) -> Run:
        """What all lines say; ``path`` is the log's, for people."""
        run = self._run
        if not self._records and (self._foreign or self._damaged or self._no_record):
            what = f"schema {SCHEMA}" if self._foreign else "a record a line"
            raise K3TuneError(
                f"{path} holds no record that can be read, expected {what}: name the output_dir of "
                "a run of this k3tune"
            )
        run.path = path
        run.train, run.evals, run.mismatch = (table.freeze() for table in self._tables.values())
        run.distributions = list(self._recent)
        run.router_layers = self._layers.rows
        entries = {entry[1]: entry for entry in (*self._worst, self._last_worst) if entry}
        run.worst = [_parsed(entries[step][2]) for step in sorted(entries)]
        run.notes = list(self._notes())
        return run

    def _notes(self) -> Iterator[str]:
        if self._cut:
            yield "The last line of the log is cut short and was left out."
        if self._damaged:
            yield (
                f"{self._damaged} damaged lines were left out, the first is line "
                f"{self._first_damaged}."
            )
        if self._foreign:
            yield f"{self._foreign} records of another schema than {SCHEMA} were left out."
        run = self._run
        if dropped := sum(part.num_dropped for part in (run.train, run.evals, run.mismatch)):
            yield (
                f"{dropped} records were left out: the run resumed from a checkpoint before them "
                "and did their steps again."
            )


class _Thinned:
    """Rows at even distances, at most ``limit`` of however many come."""

    def __init__(self, limit: int) -> None:
        self._limit, self._every, self._seen = limit, 1, 0
        self.rows: list[tuple[int, list[Any]]] = []

    def add(self, step: int, row: list[Any]) -> None:
        """Keep a row, or leave it out; every second one goes when there are too many."""
        if self._seen % self._every == 0:
            self.rows.append((step, row))
            if len(self.rows) > self._limit:
                self.rows = self.rows[::2]
                self._every *= 2
        self._seen += 1

    def drop_after(self, step: int) -> None:
        """Forget the rows of later steps, which a resumed run does again."""
        self.rows = [entry for entry in self.rows if entry[0] <= step]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}


def _read_floor(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """The floor a run keeps for its resumes, where the log has lost its record."""
    try:
        floor = _parsed(path.read_bytes())
    except OSError:
        return None
    if floor:
        notes.append("The log has no floor, so the one of floor.json is shown.")
    return floor or None


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    # parsing YAML takes longer than all else of a short report, so the import waits for a file
    if not path.is_file():
        return {}
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        config = yaml.load(path.read_bytes(), loader)
    # a date of a 13th month is a ValueError
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read and was left out: {str(error).splitlines()[0]}.")
        return {}
    return config if isinstance(config, dict) else {}
