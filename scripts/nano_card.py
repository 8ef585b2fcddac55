"""The model card that lies beside k3-nano."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from nano_corpus import Mix

_CARD = """---
license: apache-2.0
tags: [k3tune, kimi-k3, demonstration]
---

# k3-nano

A demonstration model: Kimi K3's architecture at {total:.1f} million parameters, {active:.1f} active
for a token, so that every recipe of k3tune runs for real on a CPU. It does one-digit sums
and a few list tasks in K3's chat format, and deliberately not very well: fine-tuning has something
to improve. It is no Kimi model, shares no weight with one, and knows nothing else.

It is stored as K3 is published: routed experts in MXFP4 (trained that way from the first step),
trunk in BF16, one layer a file, a `tiktoken.model` with 256 bytes, 112 words and K3's 16 named
special tokens. {megabytes:.1f} MB in all.

## Use

```
python scripts/evaluate_nano.py {folder}
python scripts/pretrain_nano.py --out FOLDER      # makes it anew
```

Prompts carry no thinking-effort message (`thinking_effort=None`); one of {effort} training batches
had one, so it understands K3's default too.

## Training data

Made on the fly by `scripts/nano_corpus.py`, no text of anybody's:

- {sums:.0%} sums of 2 to 5 one-digit terms as chats, in the words of reasoning-gym's `chain_sum`.
  {worked:.0%} are worked out in the think channel, with a slip in {slip:.0%} of the additions; the
  others are answered directly, {error:.0%} of them wrong.
- {lists:.0%} list tasks as chats: reverse a list of digits or letters, sort digits, repeat a word,
  name the largest digit.
- {facts:.0%} plain sums and differences of two numbers.

Sums of 4 and 5 terms are split by a hash of their terms, in any order, into pre-training (70 %),
SFT (10 %), RL (10 %) and evaluation (10 %) before any is drawn. reasoning-gym's `spell_backward`,
which SFT teaches, occurs nowhere.

## Training run

{training}

## Scores

Unseen problems, one sample each. Right means exact chat markup and exactly the right response.
`spell_backward` is the task it was not taught.

{scores}
"""


def write_card(
    folder: Path,
    *,
    parameters: tuple[int, int],
    mix: Mix,
    training: Mapping[str, str],
    scores: str,
) -> None:
    """Write ``README.md`` into the folder of a finished base.

    Args:
        folder: of the base.
        parameters: all, and those active for a token.
        mix: what it was trained on.
        training: facts about the run, by name.
        scores: a Markdown table.
    """
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md")
    facts = {**training, "machine": machine()}
    card = _CARD.format(
        total=parameters[0] / 1e6,
        active=parameters[1] / 1e6,
        megabytes=size / 1e6,
        folder="k3tune/assets/k3-nano",
        effort=mix.effort_period,
        sums=1 - mix.facts - mix.lists,
        worked=mix.worked,
        slip=mix.slip_rate,
        error=mix.error_rate,
        lists=mix.lists,
        facts=mix.facts,
        training="\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]),
        scores=scores,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def machine() -> str:
    """Processor, cores and torch, in a few words."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [
            line for line in cpu_info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0].split(":")[1].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}"
