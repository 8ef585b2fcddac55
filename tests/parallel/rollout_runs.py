"""Sampling and GRPO where processes share experts, and the same in one process."""

import sys
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig

# The smallest GRPO run is a helper of the trainer's tests.
sys.path.append(str(Path(__file__).parents[1] / "rl"))

from tiny_grpo import GRPO, make_grpo, write_prompts

from k3tune.arguments import (
    LoraArguments,
    ModelArguments,
    MonitorArguments,
    ParallelArguments,
    RolloutArguments,
)
from k3tune.lora import adapter_state
from k3tune.rl import build_engine
from k3tune.rl.rollout import Sampling
from k3tune.train import build_model
from tiny_run import GROUPS

__all__ = ["sample", "train_grpo", "write_prompts"]
PROMPTS = {"both": ((5, 9, 3), (4,)), "one_alone": ((6, 2), ())}
"""Lengths of each rank's prompts: ranks run different numbers of forwards."""
ROLLOUT = RolloutArguments(rollout_batch_size=2)


def sample(model: Any, rank: int) -> dict[str, Any]:
    """What a rank samples, then scores, with a live adapter."""
    engine = build_engine(ROLLOUT, model)
    engine.load_adapter(1, adapter_state(model))
    found: dict[str, Any] = {}
    for name, lengths in PROMPTS.items():
        generator = torch.Generator().manual_seed(rank)
        prompts = [
            torch.randint(0, 250, (length,), generator=generator).tolist()
            for length in lengths[rank]
        ]
        sampling = Sampling(max_new_tokens=4 + 3 * rank)
        rollouts = engine.generate(prompts, sampling, list(range(len(prompts))))
        ids = [list(rollout.completion_ids) for rollout in rollouts]
        found[name] = {
            "ids": ids,
            "logprobs": [list(rollout.logprobs) for rollout in rollouts],
            "scores": engine.score(list(zip(prompts, ids, strict=True))),
        }
    return found


def train_grpo(
    folder: Path,
    run: str,
    size: int,
    world: int,
    rollout: RolloutArguments = ROLLOUT,
    max_steps: int = 2,
) -> Any:
    """Steps of four samples with floor and canary, to the folder's ``grpo_<run>``."""
    output_dir = folder / f"grpo_{run}"
    batch = {"per_device_train_batch_size": 4 // world, "learning_rate": 1e-3}
    batch["max_steps"] = max_steps
    training = GRPOConfig(str(output_dir), **{**GRPO, **batch})
    lora = LoraArguments(lora_targets=list(GROUPS), lora_rank=2, lora_alpha=4.0)
    parallel = ParallelArguments(expert_parallel_size=size)
    base = folder / "sft_base"
    options = ModelArguments(str(base), dtype="float32")
    trainer = make_grpo(
        base,
        folder / "prompts.jsonl",
        output_dir,
        model=build_model(options, lora, training, parallel),
        rollout=rollout,
        monitor=MonitorArguments(floor_prompts=4, floor_samples=1),
        **batch,
    )
    trainer.train()
    trainer.save_model()
    return trainer
