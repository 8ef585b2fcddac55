"""Write k3-nano's fine-tuning data as JSONL: chats for SFT, or prompts with answers for RL.

    python scripts/make_nano_data.py sft --spell 3000 --replay 2000 --out sft.jsonl
    python scripts/make_nano_data.py rl --count 2000 --out rl.jsonl

The SFT file holds words to spell backward, new to the base, and for replay sums answered as in
pre-training, errors included: correct ones would teach the old task a second thing. Both draw from
their own stage of nano_tasks.py, so evaluation problems are in neither.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from k3tune.files import replace_file
from nano_corpus import Mix
from nano_tasks import Reply, direct_reply, draw_problems, messages, worked_reply


def sft_rows(num_words: int, num_sums: int, seed: int) -> list[dict[str, Any]]:
    """Chats in random order, each a dict with ``messages``.

    Args:
        num_words: words to spell backward.
        num_sums: sums for replay.
        seed: of the draw.

    Raises:
        ValueError: if the stage has fewer words.
    """
    rng, mix = random.Random(f"sft {seed}"), Mix()
    chats = [
        messages(problem, Reply("", problem.answer))
        for problem in draw_problems("spell_backward", "sft", num_words, seed)
    ]
    for problem in draw_problems("chain_sum", "sft", num_sums, seed):
        if rng.random() < mix.worked:
            reply = worked_reply(rng, problem, mix.slip_rate)
        else:
            reply = direct_reply(rng, problem, mix.error_rate)
        chats.append(messages(problem, reply))
    rng.shuffle(chats)
    return [{"messages": chat} for chat in chats]


def rl_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums to be answered, each a dict with ``prompt`` (messages) and ``answer``."""
    problems = draw_problems("chain_sum", "rl", count, seed)
    random.Random(f"rl {seed}").shuffle(problems)
    return [{"prompt": messages(problem), "answer": problem.answer} for problem in problems]


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write fine-tuning data for k3-nano.")
    stages = parser.add_subparsers(dest="stage", required=True)
    sft = stages.add_parser("sft", help="chats: a new task and replay of an old one")
    sft.add_argument("--spell", type=int, default=3000, help="words to spell backward")
    sft.add_argument("--replay", type=int, default=2000, help="sums")
    rl = stages.add_parser("rl", help="prompts and answers: sums")
    rl.add_argument("--count", type=int, default=2000, help="sums")
    for stage in (sft, rl):
        stage.add_argument("--seed", type=int, default=0, help="same seed, same file")
        stage.add_argument("--out", type=Path, required=True, help="JSONL file; replaced")
    arguments = parser.parse_args()
    if arguments.stage == "sft":
        rows = sft_rows(arguments.spell, arguments.replay, arguments.seed)
    else:
        rows = rl_rows(arguments.count, arguments.seed)
    with replace_file(arguments.out) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{len(rows)} rows in {arguments.out}")


if __name__ == "__main__":
    main()
