"""How often k3-nano, with or without an adapter, answers unseen problems right.

    python scripts/evaluate_nano.py BASE [--adapter FOLDER] [--json FILE]

Problems come from the evaluation stage of nano_tasks.py, which no training draws from. An answer
counts when the whole reply is exact chat markup and its response is exactly the right answer.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import k3tune
from k3tune.data.chat import render_chat
from k3tune.data.tokenizer import K3Tokenizer
from k3tune.model.sampling import sample_rows
from nano_tasks import TASKS, Problem, draw_problems, messages, parse_reply

_MAX_NEW_TOKENS = 64
_BATCH_SIZE = 128


class Score(NamedTuple):
    """What a set of problems came to; shares of ``problems``.

    Attributes:
        task: which problems.
        temperature: 0 for the likeliest token.
        problems: how many, one sample each.
        accuracy: right answers in exact markup.
        standard_error: of the accuracy, over problems.
        format_rate: replies in exact markup, right or wrong.
        think_rate: replies with a non-empty think channel.
    """

    task: str
    temperature: float
    problems: int
    accuracy: float
    standard_error: float
    format_rate: float
    think_rate: float


def evaluate(
    model: Any,
    tokenizer: K3Tokenizer,
    problems: Sequence[Problem],
    *,
    temperature: float,
    seed: int = 0,
    thinking_effort: str | None = None,
) -> list[Score]:
    """Sample one reply a problem and score it, by task and number of terms.

    Args:
        model: a K3 model in eval mode, adapted or not.
        tokenizer: of the base.
        problems: any number.
        temperature: 0 for the likeliest token.
        seed: of the samples.
        thinking_effort: of the chat format; k3-nano is at home without one.
    """
    # equal lengths side by side: little is padded
    ordered = sorted(problems, key=lambda problem: len(problem.question))
    prompts = [
        render_chat(
            messages(problem),
            tokenizer,
            thinking_effort=thinking_effort,
            add_generation_prompt=True,
        ).input_ids
        for problem in ordered
    ]
    rows = sample_rows(
        model,
        prompts,
        max_new_tokens=_MAX_NEW_TOKENS,
        temperature=temperature,
        seed=seed,
        batch_size=_BATCH_SIZE,
    )
    outcomes: dict[str, list[tuple[bool, bool, bool]]] = {}
    for problem, row in zip(ordered, tqdm(rows, total=len(prompts), leave=False), strict=True):
        reply = parse_reply(row, tokenizer)
        outcome = (
            reply is not None and reply.answer == problem.answer,
            reply is not None,
            reply is not None and bool(reply.reasoning),
        )
        for group in _groups(problem):
            outcomes.setdefault(group, []).append(outcome)
    return [_score(task, temperature, outcomes[task]) for task in sorted(outcomes)]


def _groups(problem: Problem) -> tuple[str, ...]:
    if problem.task == "chain_sum":
        return (problem.task, f"{problem.task}, {problem.subject.count(' ') // 2 + 1} terms")
    return (problem.task,)


def _score(task: str, temperature: float, outcomes: list[tuple[bool, bool, bool]]) -> Score:
    count = len(outcomes)
    accuracy, format_rate, think_rate = (
        sum(column) / count for column in zip(*outcomes, strict=True)
    )
    error = math.sqrt(accuracy * (1 - accuracy) / count)
    return Score(task, temperature, count, accuracy, error, format_rate, think_rate)


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = [
        f"| {'task':<18} |   T |    n | {'accuracy':>14} | format | thinks |",
        f"|{'-' * 20}|----:|-----:|{'-' * 15}:|-------:|-------:|",
    ]
    lines += [
        f"| {s.task:<18} | {s.temperature:>3.1f} | {s.problems:>4} | {s.accuracy:>6.1%} +- "
        f"{s.standard_error:>4.1%} | {s.format_rate:>6.1%} | {s.think_rate:>6.1%} |"
        for s in scores
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, evaluate, print a table and the JSON's place."""
    parser = argparse.ArgumentParser(description="Score k3-nano on unseen problems.")
    parser.add_argument("base", type=Path, help="folder of the base")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to load over it")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--count", type=int, default=512, help="problems a task")
    parser.add_argument(
        "--temperature", type=float, action="append", help="default: 1 and then 0 (greedy)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of problems and samples")
    parser.add_argument("--effort", help="thinking effort of the chat format; default none")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="file to write the scores to")
    arguments = parser.parse_args()
    started = time.monotonic()
    model: Any = k3tune.load_base(arguments.base, dtype=getattr(torch, arguments.dtype))
    if arguments.adapter is not None:
        model = k3tune.load_adapter(model, arguments.adapter)
    tokenizer = K3Tokenizer.from_pretrained(arguments.base)
    problems = [
        problem
        for task in arguments.task or TASKS
        for problem in draw_problems(task, "evaluation", arguments.count, arguments.seed)
    ]
    scores = []
    for temperature in arguments.temperature or (1.0, 0.0):
        scores += evaluate(
            model,
            tokenizer,
            problems,
            temperature=temperature,
            seed=arguments.seed,
            thinking_effort=arguments.effort,
        )
    print(table(scores))
    report = {
        "base": str(arguments.base),
        "adapter": None if arguments.adapter is None else str(arguments.adapter),
        "seed": arguments.seed,
        "dtype": arguments.dtype,
        "thinking_effort": arguments.effort,
        "seconds": round(time.monotonic() - started, 1),
        "load_average": os.getloadavg()[0],
        "scores": [score._asdict() for score in scores],
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['seconds']} s, load average {report['load_average']:.1f}")


if __name__ == "__main__":
    main()
