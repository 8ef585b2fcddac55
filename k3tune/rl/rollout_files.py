"""The samples of the newest steps, as JSONL in ``output_dir/rollouts``, written before rewards run.

``step-<step>.<process>.jsonl``: the step they are sampled for (from 1), and the process. One line a
sample, in the order rewards get them: ``sample_id``, ``seed``, ``adapter_version``,
``finish_reason``, ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``completion`` (its text, or
the message).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3tune.files import replace_file
from k3tune.rl.rollout import Rollout

FOLDER = "rollouts"
_FILE = re.compile(r"step-(\d+)\.(\d+)\.jsonl")


def rollout_row(sample_id: int, seed: int, rollout: Rollout, completion: Any) -> dict[str, Any]:
    """One sample as a line holds it.

    Args:
        sample_id: of its row of the data.
        seed: it was drawn with.
        rollout: the sample.
        completion: what rewards get: a list with one message, or a text.
    """
    return {
        "sample_id": sample_id,
        "seed": seed,
        "adapter_version": rollout.adapter_version,
        "finish_reason": rollout.finish_reason,
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "logprobs": rollout.logprobs,
        "completion": completion,
    }


def write_rollouts(
    output_dir: Path, step: int, process: int, rows: Sequence[Mapping[str, Any]], *, keep: int
) -> Path:
    """Write a process's samples, and delete its files of all but the newest ``keep`` steps."""
    folder = output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{step}.{process}.jsonl"
    with replace_file(file) as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    own = []
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match is not None and int(match[2]) == process:
            own.append((int(match[1]), path))
    for _, path in sorted(own)[:-keep]:
        path.unlink(missing_ok=True)
    return file
