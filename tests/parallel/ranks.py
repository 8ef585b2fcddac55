"""Starts a script as the processes of one DeepSpeed job on the CPU, without a launcher between."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def start_ranks(script: Path, world: int, *words: object, zero_stage: int = 2) -> list:
    """The processes, whose output goes to pipes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [REPOSITORY / name for name in (".", "kernels", "tests", "tests/train")]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, script.parent])),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        # what accelerate launch would set
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(zero_stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, words)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def run_ranks(script: Path, world: int, *words: object, zero_stage: int = 2) -> list[str]:
    """Start, and :func:`finish`."""
    return finish(start_ranks(script, world, *words, zero_stage=zero_stage))


def finish(processes: list) -> list[str]:
    """Outputs of processes, each of which must end well."""
    outputs = wait_for(processes, timeout_s=600)
    codes = [process.returncode for process in processes]
    ends = [f"-- exit {code}:\n{text}" for code, text in zip(codes, outputs, strict=True)]
    assert not any(codes), "\n".join(ends)
    return outputs


def wait_for(processes: list, timeout_s: float) -> list[str]:
    """Outputs of processes that end within the time; all are killed if one does not."""
    deadline = time.monotonic() + timeout_s
    try:
        return [
            process.communicate(timeout=deadline - time.monotonic())[0] for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
