"""How fast the local engine samples: tokens/s, ms a step, against a prefill of the same tokens.

    PYTHONPATH=tests python scripts/bench_sampling.py [--base DIR] [--dtype float32] [--rank 8]
        [--steps 96]

Prints one table for batches of 1, 16 and 64 rows, and how much a step of a model with KDA layers
alone (random weights, k3-nano's sizes) costs at position 512 against position 32. Quiet cores: look
at the load average it prints.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoints import build_checkpoint
from k3tune import load_base
from k3tune.lora import LoraSpec, attach_lora
from k3tune.lora.inject import base_of
from k3tune.model import K3ForCausalLM
from k3tune.rl.engines import ContinuousSampler
from k3tune.rl.rollout import Sampling
from k3tune_kernels.cpu import library

NANO = Path(__file__).parents[1] / "k3tune" / "assets" / "k3-nano"
GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")
BATCHES = (1, 16, 64)
PROMPT, WARM_UP = 32, 8
POSITIONS = (32, 512)
TEXT_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "attn_res_block_size",
    "vocab_size",
)


class Figures(NamedTuple):
    """Of one batch size; times in ms."""

    batch: int
    step: float
    fastest_step: float
    prefill: float

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens."""
        return 1e3 * self.batch / self.step


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def sampler_of(model: K3ForCausalLM, batch: int, prompt: int, steps: int) -> ContinuousSampler:
    """Rows of random prompts that are prefilled and run for at least so many steps."""
    sampler = ContinuousSampler(model, max_batch_size=batch)
    ids = torch.randint(0, 256, (batch, prompt), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(max_new_tokens=steps + 1, stop_token_ids=())
    for row, row_ids in enumerate(ids.tolist()):
        sampler.submit(row, row_ids, sampling, row)
    sampler.step()
    return sampler


def measure(model: K3ForCausalLM, batch: int, count: int) -> Figures:
    """``count`` decoding steps, and forward passes over as many tokens a row, divided by them."""
    sampler = sampler_of(model, batch, PROMPT, WARM_UP + count)
    for _ in range(WARM_UP):
        sampler.step()
    steps = [timed(sampler.step) for _ in range(count)]
    ids = torch.randint(0, 256, (batch, count))
    passes = []
    with torch.no_grad():
        for _ in range(5):
            elapsed = timed(lambda: model.model(ids, use_cache=False))
            passes.append(elapsed / count)
    return Figures(batch, statistics.median(steps), min(steps), statistics.median(passes))


def kda_only(folder: Path, rank: int) -> K3ForCausalLM:
    """A model of the base's sizes whose layers are all KDA, random weights."""
    text = json.loads((NANO / "config.json").read_text())["text_config"]
    linear = text["linear_attn_config"]
    build_checkpoint(
        folder,
        mla_layers=[],
        kda_num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        **{field: text[field] for field in TEXT_FIELDS},
    )
    return loaded(folder, torch.float32, rank)


def constancy(model: K3ForCausalLM, batch: int, count: int) -> tuple[float, float]:
    """Median ms of a step at both positions, measured in turns."""
    samplers = [sampler_of(model, batch, position, WARM_UP + count) for position in POSITIONS]
    times: list[list[float]] = [[], []]
    for number in range(WARM_UP + count):
        for sampler, found in zip(samplers, times, strict=True):
            elapsed = timed(sampler.step)
            if number >= WARM_UP:
                found.append(elapsed)
    return statistics.median(times[0]), statistics.median(times[1])


def loaded(folder: Path, dtype: torch.dtype, rank: int) -> K3ForCausalLM:
    """A base with an adapter on everything, or bare."""
    model = load_base(folder, dtype=dtype)
    if rank:
        model = attach_lora(model, LoraSpec(targets=GROUPS, rank=rank, alpha=2 * rank))
    return base_of(model).eval()


def machine() -> str:
    """What the figures depend on, in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
    kernels = "none" if library.obstacle() else library.isas()[0]
    return (
        f"{name} ({platform.machine()}), {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, CPU kernels {kernels}, load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, default=NANO, help="checkpoint folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter; 0 samples the base")
    parser.add_argument("--steps", type=int, default=96, help="measured for each figure")
    options = parser.parse_args()
    print(f"{machine()}\n")
    model = loaded(options.base, getattr(torch, options.dtype), options.rank)
    print(f"{options.base.name}, {options.dtype}, adapter rank {options.rank}")
    print(f"prompts of {PROMPT} tokens, medians of {options.steps} steps\n")
    print("| batch | tokens/s | ms a step | fastest | prefill, ms | step / prefill |")
    print("|---|---|---|---|---|---|")
    for batch in BATCHES:
        f = measure(model, batch, options.steps)
        print(
            f"| {batch} | {f.tokens_per_s:,.0f} | {f.step:.1f} | {f.fastest_step:.1f} "
            f"| {f.prefill:.2f} | {f.step / f.prefill:.2f} |"
        )
    with tempfile.TemporaryDirectory() as folder:
        near, far = constancy(kda_only(Path(folder), options.rank), BATCHES[-1], options.steps)
    print(
        f"\nKDA layers alone, fp32, batch {BATCHES[-1]}: {near:.1f} ms a step at position "
        f"{POSITIONS[0]}, {far:.1f} ms at {POSITIONS[1]}: ratio {far / near:.3f}"
    )
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
