"""Print what a demo's run came to: scores before and after, losses, times, places.

    python scripts/summarize_demo.py FOLDER

FOLDER holds what demo.sh leaves there: before.json and after.json of evaluate_nano.py, and sft/,
the output of recipes/sft.py.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3tune.run_log import read_run_log

_TASKS = {"spell_backward": "new task, spell_backward", "chain_sum": "old task, chain_sum"}


def summary(folder: Path) -> str:
    """The summary of a demo's folder.

    Raises:
        K3TuneError: if the run's log cannot be read.
        OSError: if a file is missing.
    """
    before, after = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("before", "after")
    )
    log = read_run_log(folder / "sft")
    train, [end] = log.of_kind("train"), log.of_kind("end")[-1:]
    adapter = folder / "sft" / "adapter"
    size = sum(file.stat().st_size for file in adapter.iterdir())
    speed = sum(record["tokens_per_s"] for record in train) / len(train)
    return "\n".join(
        [
            f"{'right answers to unseen problems':<34}  before   after",
            *_score_lines(_accuracies(before), _accuracies(after)),
            "",
            f"loss per trained token: {train[0]['loss']:.3f} -> {train[-1]['loss']:.3f} "
            f"in {end['step']} steps",
            f"training: {end['train_runtime']:.0f} s, {speed:,.0f} tokens/s, peak memory "
            f"{train[-1]['peak_memory_bytes'] / 2**20:,.0f} MiB",
            f"evaluation: {before['seconds']:.0f} s before, {after['seconds']:.0f} s after",
            f"load average at the end: {after['load_average']:.1f}",
            "",
            f"base:    {before['base']}",
            f"adapter: {adapter} ({size / 2**20:.1f} MiB)",
            f"log:     {folder / 'sft' / 'run_log.jsonl'}",
        ]
    )


def _accuracies(report: Mapping[str, Any]) -> dict[tuple[str, float], Mapping[str, Any]]:
    return {(score["task"], score["temperature"]): score for score in report["scores"]}


def _score_lines(
    before: Mapping[tuple[str, float], Mapping[str, Any]],
    after: Mapping[tuple[str, float], Mapping[str, Any]],
) -> list[str]:
    lines = []
    for task, name in _TASKS.items():
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
