"""Does GRPO lift k3-nano, for several seeds, and not with shuffled rewards? Prints the table.

    python scripts/check_grpo_nano.py --out runs/check-grpo [--steps 60] [--seed 0 --seed 1]

Each run is recipes/grpo.py with nano_grpo.yaml, from the base. Scores are of problems that occur in
no training (evaluate_nano.py), the same ones for the base and every run. Exit code 1 if a target is
missed: +20 points at temperature 1 and greedy up in at most 300 s of training for every seed, at
most +5 points with shuffled rewards, and every step's KL at the floor.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import k3tune
from evaluate_nano import evaluate
from k3tune.data import K3Tokenizer
from k3tune.run_log import read_run_log
from make_nano_data import rl_rows
from nano_tasks import draw_problems

ROOT = Path(__file__).parents[1]
BASE = ROOT / "k3tune" / "assets" / "k3-nano"
_SHUFFLED = f"{Path(__file__).parent / 'shuffled_reward.py'}:shuffled_match"
_LEAST_GAIN, _MOST_SHUFFLED, _MOST_S = 0.20, 0.05, 300.0


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        name: of the run.
        sampled, greedy: right answers to unseen problems, shares.
        seconds: of training, calibration included; 0 for the base.
        first, last: mean training reward of the first and the last ten steps.
        verdicts: steps by the monitor's verdict.
        k3: largest of a step.
    """

    name: str
    sampled: float
    greedy: float
    seconds: float = 0.0
    first: float = 0.0
    last: float = 0.0
    verdicts: str = ""
    k3: float = 0.0


def scores(adapter: Path | None, count: int) -> tuple[float, float]:
    """Accuracy at temperature 1 and greedy, on the same problems whatever the adapter."""
    model: Any = k3tune.load_base(BASE, dtype=torch.float32)
    if adapter is not None:
        model = k3tune.load_adapter(model, adapter)
    problems = draw_problems("chain_sum", "evaluation", count, 0)
    tokenizer = K3Tokenizer.from_pretrained(BASE)
    found = [
        score.accuracy
        for temperature in (1.0, 0.0)
        for score in evaluate(model, tokenizer, problems, temperature=temperature)
        if score.task == "chain_sum"
    ]
    return found[0], found[1]


def train(folder: Path, prompts: Path, seed: int, steps: int, more: list[str]) -> None:
    """One run of the recipe, in a process of its own."""
    command = [
        *(sys.executable, str(ROOT / "recipes" / "grpo.py")),
        *("--config", str(ROOT / "recipes" / "configs" / "nano_grpo.yaml"), "--base", str(BASE)),
        *("--train_path", str(prompts), "--output_dir", str(folder), "--seed", str(seed)),
        *("--max_steps", str(steps), "--save_steps", str(steps), "--report_to", "none"),
        *("--disable_tqdm", "true", *more),
    ]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def outcome(name: str, folder: Path, count: int) -> Outcome:
    """Read a finished run and score its adapter."""
    log = read_run_log(folder)
    rewards = [record["reward"] for record in log.of_kind("train")]
    steps = log.of_kind("mismatch")
    verdicts = Counter(record["verdict"] for record in steps)
    return Outcome(
        name,
        *scores(folder / "adapter", count),
        log.of_kind("end")[-1]["train_runtime"],
        sum(rewards[:10]) / len(rewards[:10]),
        sum(rewards[-10:]) / len(rewards[-10:]),
        ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items()),
        max(record["k3"] for record in steps),
    )


def table(base: Outcome, runs: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| run | T = 1 | gain | greedy | gain | reward | training | steps by verdict | max k3 |",
        "|---|---:|---:|---:|---:|---|---:|---|---:|",
        f"| base | {base.sampled:.1%} | | {base.greedy:.1%} | | | | | |",
    ]
    lines += [
        f"| {run.name} | {run.sampled:.1%} | {run.sampled - base.sampled:+.1%} | {run.greedy:.1%} "
        f"| {run.greedy - base.greedy:+.1%} | {run.first:.2f} -> {run.last:.2f} "
        f"| {run.seconds:.0f} s | {run.verdicts} | {run.k3:.1e} |"
        for run in runs
    ]
    return "\n".join(lines)


def missed(base: Outcome, runs: list[Outcome], control: Outcome | None) -> list[str]:
    """Sentences about targets that were not met."""
    found = []
    for run in runs:
        if run.sampled - base.sampled < _LEAST_GAIN:
            found.append(f"{run.name}: gains less than {_LEAST_GAIN:.0%} at T = 1")
        if run.greedy <= base.greedy:
            found.append(f"{run.name}: greedy is not up")
        if run.seconds > _MOST_S:
            found.append(f"{run.name}: trained for more than {_MOST_S:.0f} s")
    if control is not None and control.sampled - base.sampled > _MOST_SHUFFLED:
        found.append(f"{control.name}: gains more than {_MOST_SHUFFLED:.0%} at T = 1")
    for run in [*runs, *([control] if control else [])]:
        if not run.verdicts.startswith("at floor") or "," in run.verdicts:
            found.append(f"{run.name}: not every step is at the floor")
    return found


def main() -> int:
    """Run everything, print the table, and say what was missed."""
    parser = argparse.ArgumentParser(description="Check GRPO on k3-nano.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--count", type=int, default=512, help="problems to score")
    parser.add_argument("--no-control", action="store_true", help="without shuffled rewards")
    parser.add_argument("option", nargs="*", help="more options of the recipe, after --")
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rl_rows(2000, 0)))
    base = Outcome("base", *scores(None, arguments.count))
    runs = []
    for seed in arguments.seed or (0, 1, 2):
        name = f"seed-{seed}"
        train(folder / name, prompts, seed, arguments.steps, arguments.option)
        runs.append(outcome(name, folder / name, arguments.count))
        print(table(base, runs), flush=True)
    control = None
    if not arguments.no_control:
        shuffled = [*arguments.option, "--rewards", _SHUFFLED]
        train(folder / "shuffled", prompts, 0, arguments.steps, shuffled)
        control = outcome("shuffled rewards", folder / "shuffled", arguments.count)
    print()
    print(table(base, [*runs, *([control] if control else [])]))
    print(f"\n{arguments.count} problems, load average {os.getloadavg()[0]:.1f}")
    problems = missed(base, runs, control)
    for sentence in problems:
        print(f"missed: {sentence}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
