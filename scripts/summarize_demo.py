"""Print what a demo's run came to: scores before and after, losses, times, places.

    python scripts/summarize_demo.py FOLDER

FOLDER holds what demo.sh leaves there: before.json, after.json and after_grpo.json of
evaluate_nano.py, sft/, the output of recipes/sft.py, and grpo/, that of recipes/grpo.py.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3tune.run_log import read_run_log

_TASKS = {"spell_backward": "new task, spell_backward", "chain_sum": "old task, chain_sum"}


def summary(folder: Path) -> str:
    """The summary of a demo's folder.

    Raises:
        K3TuneError: if a run's log cannot be read.
        OSError: if a file is missing.
    """
    before, after, after_grpo = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("before", "after", "after_grpo")
    )
    return "\n".join(
        [
            "SFT",
            *_sft_lines(folder, before, after),
            "",
            "GRPO from the base",
            *_grpo_lines(folder, before, after_grpo),
            "",
            f"evaluation: {before['seconds']:.0f} s before, {after['seconds']:.0f} s after SFT, "
            f"{after_grpo['seconds']:.0f} s after GRPO",
            f"load average at the end: {after_grpo['load_average']:.1f}",
            f"base: {before['base']}",
        ]
    )


def _sft_lines(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    log = read_run_log(folder / "sft")
    train, [end] = log.of_kind("train"), log.of_kind("end")[-1:]
    speed = sum(record["tokens_per_s"] for record in train) / len(train)
    return [
        f"{'right answers to unseen problems':<34}  before   after",
        *_score_lines(_accuracies(before), _accuracies(after), _TASKS),
        f"loss per trained token: {train[0]['loss']:.3f} -> {train[-1]['loss']:.3f} "
        f"in {end['step']} steps",
        f"training: {end['train_runtime']:.0f} s, {speed:,.0f} tokens/s, peak memory "
        f"{train[-1]['peak_memory_bytes'] / 2**20:,.0f} MiB",
        *_places(folder / "sft"),
    ]


def _grpo_lines(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    log = read_run_log(folder / "grpo")
    train, steps = log.of_kind("train"), log.of_kind("mismatch")
    [floor], [end] = log.of_kind("floor")[-1:], log.of_kind("end")[-1:]
    rewards = [record["reward"] for record in train]
    verdicts = Counter(record["verdict"] for record in steps)
    said = ", ".join(f"{verdict} in {count} steps" for verdict, count in verdicts.items())
    largest = max(record["k3"] for record in steps)
    return [
        f"{'right answers to unseen problems':<34}  before   after",
        *_score_lines(_accuracies(before), _accuracies(after), {"chain_sum": "chain_sum"}),
        f"reward: {_mean(rewards[:10]):.2f} in the first 10 steps -> {_mean(rewards[-10:]):.2f} in "
        f"the last 10 of {end['step']}",
        f"training: {end['train_runtime']:.0f} s, of a step "
        f"{_mean([record['rollout_s'] for record in train]):.1f} s sampling and "
        f"{_mean([record['forward_backward_s'] for record in train]):.1f} s forward and backward",
        f"train-rollout KL (k3): {said}; largest {largest:.1e}, floor {floor['k3']['value']:.1e} "
        f"(95 % {floor['k3']['low']:.1e} to {floor['k3']['high']:.1e})",
        *_places(folder / "grpo"),
    ]


def _places(run: Path) -> list[str]:
    adapter = run / "adapter"
    size = sum(file.stat().st_size for file in adapter.iterdir())
    return [f"adapter: {adapter} ({size / 2**20:.1f} MiB)", f"log: {run / 'run_log.jsonl'}"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _accuracies(report: Mapping[str, Any]) -> dict[tuple[str, float], Mapping[str, Any]]:
    return {(score["task"], score["temperature"]): score for score in report["scores"]}


def _score_lines(
    before: Mapping[tuple[str, float], Mapping[str, Any]],
    after: Mapping[tuple[str, float], Mapping[str, Any]],
    tasks: Mapping[str, str],
) -> list[str]:
    lines = []
    for task, name in tasks.items():
        for temperature in (0.0, 1.0):
            how = "greedy" if temperature == 0 else f"T = {temperature:g}"
            pair = [scores[task, temperature]["accuracy"] for scores in (before, after)]
            lines.append(f"{f'{name}, {how}':<34}  {pair[0]:>6.1%}  {pair[1]:>6.1%}")
    return lines


def main() -> None:
    """Parse the command line and print the summary."""
    parser = argparse.ArgumentParser(description="Summarise a demo.")
    parser.add_argument("folder", type=Path, help="what demo.sh wrote to")
    print(summary(parser.parse_args().folder))


if __name__ == "__main__":
    main()
