"""How far two numerics are apart on k3-nano: k3 with its interval, for every pair that matters.

    python scripts/measure_floor.py [--prompts 40] [--samples 8] [--json FILE]

An engine samples with the base (decoding token by token, with caches), a trainer scores the same
tokens in one forward. Intervals are 95 %, by a bootstrap over prompts.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from k3tune.monitor import Floor
from nano_lab import NanoLab

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# dtype, what the engine and what the trainer round the experts' inputs to
PAIRS = (
    ("fp32", "none", "none"),
    ("fp32", "mxfp8", "none"),
    ("fp32", "mxfp8", "mxfp8"),
    ("bf16", "none", "none"),
    ("bf16", "mxfp8", "none"),
    ("bf16", "mxfp8", "mxfp8"),
)


def name_of(dtype: str, rounding: str) -> str:
    """A side's numerics in words."""
    return dtype if rounding == "none" else f"{dtype} + {rounding.upper()}"


def measure(num_prompts: int, num_samples: int, seed: int) -> list[dict[str, Any]]:
    """One row a pair; trainers of one dtype score the same samples of an engine."""
    rows = []
    for dtype in DTYPES:
        lab = NanoLab(DTYPES[dtype])
        prompts = lab.prompts(num_prompts, seed)
        sampled: dict[str, Any] = {}
        for _, engine, trainer in (pair for pair in PAIRS if pair[0] == dtype):
            lab.rounding = {"engine": engine, "trainer": trainer}
            if engine not in sampled:
                sampled[engine] = lab.sample(None, 0, prompts, each=num_samples, seed=seed)
            samples = lab.compare(None, sampled[engine], num_samples, 0)
            floor = Floor.calibrate(samples, key={})
            assert floor.router_mismatch is not None, "the engine returns its experts"
            rows.append(
                {
                    "engine": name_of(dtype, engine),
                    "trainer": name_of(dtype, trainer),
                    "k3": asdict(floor.k3),
                    "abs_mean": asdict(floor.abs_mean),
                    "router_mismatch": asdict(floor.router_mismatch),
                    "samples": floor.num_samples,
                    "tokens": floor.num_tokens,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| engine / trainer | k3 | mean abs r | routed apart |",
        "|---|---|---|---|",
    ]
    for row in rows:
        k3 = row["k3"]
        lines.append(
            f"| {row['engine']} / {row['trainer']} | {k3['value']:.1e} [{k3['low']:.1e}, "
            f"{k3['high']:.1e}] | {row['abs_mean']['value']:.1e} | "
            f"{row['router_mismatch']['value']:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure k3-nano's train-rollout KL floors.")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = measure(arguments.prompts, arguments.samples, arguments.seed)
    print(table(rows))
    print(
        f"{rows[0]['samples']} samples a row, {time.monotonic() - started:.0f} s, load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
