"""Reinforcement learning: rollout engines and the trainer that learns from what they sample."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.rl.grpo import K3GRPOTrainer
    from k3tune.rl.plan import describe_grpo
    from k3tune.rl.prompts import build_prompts
    from k3tune.rl.rollout import Rollout, RolloutEngine, Sampling
    from k3tune.rl.setup import build_engine, build_rewards, trainer_class

__all__ = [
    "K3GRPOTrainer",
    "Rollout",
    "RolloutEngine",
    "Sampling",
    "build_engine",
    "build_prompts",
    "build_rewards",
    "describe_grpo",
    "trainer_class",
]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "K3GRPOTrainer": "k3tune.rl.grpo",
        "Rollout": "k3tune.rl.rollout",
        "RolloutEngine": "k3tune.rl.rollout",
        "Sampling": "k3tune.rl.rollout",
        "build_engine": "k3tune.rl.setup",
        "build_prompts": "k3tune.rl.prompts",
        "build_rewards": "k3tune.rl.setup",
        "describe_grpo": "k3tune.rl.plan",
        "trainer_class": "k3tune.rl.setup",
    },
    subpackages=("engines",),
)
