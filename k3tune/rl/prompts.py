"""Prompts to sample from, tokenised, with their other columns kept for the rewards.

A sample has ``prompt``: a list of messages (rendered in K3's chat format, with ``tools`` if there
are any) or a text. All its other columns go to the reward functions as they are.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import datasets

from k3tune.arguments import PromptArguments
from k3tune.data import K3Tokenizer, render_chat
from k3tune.data.errors import DataError, Problem
from k3tune.data.sources import read_source, row_sample

logger = logging.getLogger(__name__)

SAMPLE = "sample"
"""Column with a sample's JSON: rows differ in their keys and types, which columns do not allow."""

_EXAMPLES = 3


def build_prompts(
    data: PromptArguments, tokenizer: K3Tokenizer
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The prompts for training, and those for evaluation if there are any.

    Returns:
        Datasets with columns ``input_ids``, ``sample_id`` (line, item or row, from 1) and
        :data:`SAMPLE`.

    Raises:
        DataError: if a source cannot be read, has no usable prompt, or has bad ones that were not
            to be skipped.
    """
    train = load_prompts(data.train_path, data, tokenizer)
    held_out = None
    if data.eval_path is not None:
        held_out = load_prompts(data.eval_path, data, tokenizer)
    return train, held_out


def load_prompts(path: str, data: PromptArguments, tokenizer: K3Tokenizer) -> datasets.Dataset:
    """The prompts of one source; see :func:`build_prompts`."""
    rows, unit = read_source(path)
    columns: dict[str, list[Any]] = {"input_ids": [], "sample_id": [], SAMPLE: []}
    problems: Counter[Problem] = Counter()
    first: list[str] = []
    for index, row in enumerate(rows):
        number = row.get("__number", index + 1)
        try:
            sample = row_sample(row)
            columns["input_ids"].append(encode_prompt(sample, data, tokenizer))
        except DataError as error:
            problems[error.problem] += 1
            first.append(f"{path} {unit} {number}: {error}")
            continue
        columns["sample_id"].append(number)
        columns[SAMPLE].append(json.dumps(sample))
    if not len(rows):
        raise DataError(f"{path} holds no prompt, expected at least one", Problem.UNKNOWN_FORM)
    num_kept = len(columns[SAMPLE])
    report = f"{path}: {num_kept} of {len(rows)} prompts kept"
    if problems:
        counts = ", ".join(f"{count} {problem}" for problem, count in problems.most_common())
        report += "; left out: " + counts + "\n  " + "\n  ".join(first[:_EXAMPLES])
    if not num_kept or (problems and data.on_bad_sample == "error"):
        raise DataError(report, next(iter(problems), Problem.UNKNOWN_FORM))
    logger.log(logging.WARNING if problems else logging.INFO, "%s", report)
    return datasets.Dataset.from_dict(columns)


def encode_prompt(
    sample: Mapping[str, Any], data: PromptArguments, tokenizer: K3Tokenizer
) -> list[int]:
    """Ids of a sample's prompt, up to where the completion begins.

    Raises:
        DataError: if there is no prompt, or it is not valid or too long.
    """
    prompt = sample.get("prompt")
    if isinstance(prompt, str) and prompt:
        ids = tokenizer.encode_text(prompt)
    elif isinstance(prompt, list) and prompt:
        effort = None if data.thinking_effort == "none" else data.thinking_effort
        ids = render_chat(
            prompt,
            tokenizer,
            tools=sample.get("tools"),
            thinking=data.thinking,
            thinking_effort=effort,
            add_generation_prompt=True,
        ).input_ids
    else:
        raise DataError(
            f"prompt is {prompt!r}, expected a text or a list of messages", Problem.UNKNOWN_FORM
        )
    if len(ids) > data.max_prompt_length:
        raise DataError(
            f"the prompt has {len(ids)} tokens, expected at most {data.max_prompt_length}",
            Problem.TOO_LONG,
        )
    return ids
