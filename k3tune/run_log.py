"""The log of a run: ``run_log.jsonl`` in ``output_dir``, one JSON object a line.

Every record has ``schema`` (1), ``kind``, ``time`` (seconds since 1970, UTC) and ``step``
(optimizer steps done). A file grows at its end only. Each line is one write, so a run killed at
any point leaves at most its last line cut short; lines reach the disk with every checkpoint and at
the end of the run (an ``fsync``), so a power cut may take those after the last checkpoint.

Kinds and what they hold beside that (GRPO runs have four more: :mod:`k3tune.monitor.record`):

- ``run``: a process group starts or goes on: ``config_sha256``, ``versions``, ``git_commit``,
  ``resumed_from`` (a checkpoint's name, or null), ``processes``, ``device``. Records of later steps
  that stand before it belong to work that was lost and done again: the reader drops them.
- ``train``: every ``logging_steps``; means over the steps since the record before, unless said:
  ``loss`` (per trained token), ``learning_rate`` and ``grad_norm`` (of the last step, before
  clipping), ``grad_norm/<group>`` a target group, ``entropy`` and ``mean_token_accuracy`` (as TRL
  computes them), ``num_tokens`` (all tokens so far, prompts included), ``tokens`` and
  ``trained_tokens`` (summed, all processes), ``tokens_per_s`` (all processes; over the three times
  below, so evaluation and saving do not count), ``mfu`` (null where the device's peak is not
  known), ``peak_memory_bytes`` (of this process, since its start), ``router_load/<layer>``
  (assignments of the busiest expert over the mean, summed over the record's steps) and
  ``router_load`` (the largest of them), ``data_s``, ``forward_backward_s``, ``optimizer_s``
  (seconds a step, of this process), ``epoch``; under expert parallelism also
  ``exchange_bytes/<kind>`` (a step, between processes, all of them: ``counts``, ``dispatch`` to the
  experts, ``combine`` back, ``gradient``) and ``exchange_messages``; with a sharded trunk, of this
  process: ``trunk_received_bytes`` (a step, from the other ranks; those of forwards beside training
  count), ``trunk_prefetch_hits`` (share of the gathers that had begun before they were needed) and
  ``trunk_resident_bytes`` (of its shards).
  GRPO runs have no ``trained_tokens`` and ``mean_token_accuracy``; ``tokens`` are those of prompts
  and completions. They add ``reward`` and ``reward_std`` (over the step's samples, weighted sum of
  the functions), ``reward/<function>`` and ``reward_std/<function>``, ``zero_std_groups`` (share of
  prompts whose samples have equal rewards), ``completion_tokens`` (mean), ``truncated_fraction``
  (share of samples without a stop token), ``bad_rewards`` (samples a function failed on),
  ``stale_samples``, ``masked_fraction`` and ``importance_truncated_fraction`` (tokens whose weight
  the importance correction set to 0, or cut), ``router_mismatch_used`` (share of (token, layer)
  whose experts in training are not the rollout's, with ``routing: replay``), ``adapter_version``
  (after the step's push), ``unchanged_pushes`` (so far), ``mismatch/<field>`` (headline fields of
  the record ``mismatch``) and ``mismatch/alarms``, ``rollout_s``, ``reward_s``, ``push_s``,
  ``monitor_s``, and TRL's own ``completions/*``, ``clip_ratio/*``, ``kl`` (to the base, with
  ``beta``) and ``step_time``.
- ``eval``: ``eval_loss`` (per trained token), TRL's ``eval_*`` and the Trainer's timings.
- ``end``: the Trainer's summary of the run, and ``reason``: ``finished``, ``terminated``
  (SIGTERM) or ``alarm`` (of the monitor).

A key may be missing from a record; a name never changes its meaning within a schema version.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3tune.errors import K3TuneError

SCHEMA = 1
FILE_NAME = "run_log.jsonl"


class RunLogWriter:
    """Appends records to a run's log.

    A last line that an earlier process left cut short is removed first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._drop_cut_line()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record.

        Args:
            kind: see the module's text.
            step: optimizer steps done.
            values: JSON values; not-a-number and infinities become null.

        Raises:
            K3TuneError: if it cannot be written, as on a full disk.
        """
        record = {"schema": SCHEMA, "kind": kind, "time": time.time(), "step": step}
        for name, value in values.items():
            record[name] = (
                None if value in (float("inf"), float("-inf")) or value != value else value
            )
        line = json.dumps(record, allow_nan=False).encode("utf-8") + b"\n"
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            raise K3TuneError(
                f"cannot write {self.path}: {error.strerror}: make room there, or name another "
                "output_dir"
            ) from error

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Sync and close; a second call does nothing."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1

    def _drop_cut_line(self) -> None:
        end = position = os.fstat(self._file).st_size
        while position:
            start = max(0, position - 65536)
            block = os.pread(self._file, position - start, start)
            newline = block.rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            os.ftruncate(self._file, position)


@dataclass(frozen=True)
class RunLog:
    """What a log says.

    Attributes:
        records: in order, without the superseded ones.
        num_superseded: records of steps that a later ``run`` record did again.
        cut_line: the last line, if it was cut short, as it stands in the file; else None.
    """

    records: tuple[dict[str, Any], ...]
    num_superseded: int
    cut_line: str | None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]


def read_run_log(path: str | Path) -> RunLog:
    """Read a log, of a run that still goes on too.

    Args:
        path: the file, or the ``output_dir`` that holds it.

    Raises:
        K3TuneError: if it cannot be read, has another schema version, or naming the first line
            (from 1) but the last that is no record.
    """
    path = Path(path)
    if path.is_dir():
        path /= FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise K3TuneError(f"cannot read the run log {path}: {error.strerror}") from error
    rest = lines.pop()
    records: list[dict[str, Any]] = []
    dropped = 0
    for number, line in enumerate(lines, start=1):
        record = _parse(line, f"{path} line {number}")
        if record["kind"] == "run":
            kept = [old for old in records if old["step"] <= record["step"]]
            dropped += len(records) - len(kept)
            records = kept
        records.append(record)
    cut_line = rest.decode("utf-8", errors="replace") if rest else None
    return RunLog(tuple(records), dropped, cut_line)


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise K3TuneError(
            f"{place} is no JSON ({error}), expected a record: the file was changed or damaged"
        ) from error
    if not isinstance(record, dict) or not {"schema", "kind", "step"} <= record.keys():
        raise K3TuneError(f"{place} is no record with schema, kind and step")
    if record["schema"] != SCHEMA:
        raise K3TuneError(
            f"{place} has schema {record['schema']!r}, expected {SCHEMA}: read it with the k3tune "
            "that wrote it"
        )
    return record
