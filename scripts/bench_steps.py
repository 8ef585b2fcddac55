"""How long a training step of k3-nano takes with the native kernels, against the reference.

    python scripts/bench_steps.py [--recipe sft --recipe grpo] [--rounds 2] [--steps 8]
        [--option dtype=bfloat16]

Runs the recipes as they are, with ``kernels: auto`` and ``kernels: reference`` in turns, each run a
process of its own with the same data and seed, and prints the median seconds a step by phase and
the ratio of the sums. Quiet cores: look at the load average beside each run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k3tune.run_log import read_run_log

ROOT = Path(__file__).parents[1]
RECIPES = ("sft", "grpo")
KERNELS = ("auto", "reference")
PHASES = ("data", "rollout", "reward", "forward_backward", "optimizer", "push", "monitor")
# caches, allocators and the learning rate's warm-up: not of a step
WARM_UP = 2

Step = dict[str, float]
"""Seconds by phase."""


def write_data(folder: Path) -> dict[str, Path]:
    """The demo's data, by recipe."""
    files = {"sft": folder / "train.jsonl", "grpo": folder / "prompts.jsonl"}
    for recipe, stage in (("sft", "sft"), ("grpo", "rl")):
        script = ROOT / "scripts" / "make_nano_data.py"
        command = [sys.executable, str(script), stage, "--out", str(files[recipe])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return files


def run(recipe: str, kernels: str, data: Path, folder: Path, steps: int, more: list[str]) -> None:
    """One run of a recipe."""
    command = [
        *(sys.executable, str(ROOT / "recipes" / f"{recipe}.py")),
        *("--config", str(ROOT / "recipes" / "configs" / f"nano_{recipe}.yaml")),
        *("--base", str(ROOT / "k3tune" / "assets" / "k3-nano"), "--train_path", str(data)),
        *("--output_dir", str(folder), "--kernels", kernels, "--report_to", "none"),
        *("--max_steps", str(steps), "--save_steps", str(steps), "--logging_steps", "1"),
        *("--disable_tqdm", "true", *more),
    ]
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{recipe} with kernels {kernels} failed:\n{log.read_text()[-2000:]}")


def steps_of(folder: Path) -> list[Step]:
    """Seconds by phase of each step but the first ones."""
    records: Sequence[Mapping[str, Any]] = read_run_log(folder).of_kind("train")
    return [
        {phase: record[f"{phase}_s"] for phase in PHASES if f"{phase}_s" in record}
        for record in records[WARM_UP:]
    ]


def table(steps: Mapping[str, list[Step]]) -> str:
    """Medians in ms of each backend by phase, and the reference over ours."""
    lines = ["| | auto, ms | reference, ms | ratio |", "|---|---:|---:|---:|"]
    phases = [phase for phase in PHASES if phase in steps["auto"][0]]
    for phase in (*phases, "a step"):
        ours, other = (
            statistics.median(sum(s.values()) if phase == "a step" else s[phase] for s in steps[k])
            for k in KERNELS
        )
        lines.append(f"| {phase} | {1e3 * ours:.1f} | {1e3 * other:.1f} | {other / ours:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each backend")
    parser.add_argument("--steps", type=int, default=8, help="measured in each run")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for the recipes")
    options = parser.parse_args()
    more = [part for pair in options.option for part in _flag(pair)]
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        for recipe in options.recipe or RECIPES:
            steps: dict[str, list[Step]] = {kernels: [] for kernels in KERNELS}
            for round_number in range(options.rounds):
                for kernels in KERNELS:
                    out = folder / f"{recipe}-{kernels}-{round_number}"
                    run(recipe, kernels, data[recipe], out, options.steps + WARM_UP, more)
                    steps[kernels] += steps_of(out)
                    load = os.getloadavg()[0]
                    print(f"{out.name}: load {load:.1f}", file=sys.stderr, flush=True)
            print(f"\n{recipe}, {len(steps['auto'])} steps each {' '.join(options.option)}\n")
            print(table(steps), flush=True)


def _flag(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return f"--{name}", value


if __name__ == "__main__":
    main()
