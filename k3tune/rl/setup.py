"""From options to what the trainer takes: the engine and the rewards."""

import logging
from pathlib import Path
from typing import Any

import torch

from k3tune.arguments import RewardArguments, RolloutArguments
from k3tune.errors import ConfigError
from k3tune.lora import save_adapter
from k3tune.lora.inject import base_of
from k3tune.parallel.expert_parallel import expert_parallel_of
from k3tune.parallel.trunk_loading import sharded_trunk
from k3tune.rl.guarded import GuardedReward
from k3tune.rl.rewards import find_reward, reward_name
from k3tune.rl.rollout import RolloutEngine

logger = logging.getLogger(__name__)


def build_engine(
    rollout: RolloutArguments, model: Any, output_dir: str | Path = "."
) -> RolloutEngine:
    """The engine that samples.

    Args:
        rollout: the run's options.
        model: with the adapter that is trained.
        output_dir: of the run; servers read pushed adapters below it.

    Raises:
        ConfigError, RolloutError: if it cannot be had as asked.
    """
    if rollout.engine == "local":
        return _local_engine(rollout, model)
    return _http_engine(rollout, model, Path(output_dir))


def _http_engine(rollout: RolloutArguments, model: Any, output_dir: Path) -> RolloutEngine:
    from k3tune.rl.engines.replicas import HttpEngine
    from k3tune.rl.engines.replicas_push import PushFolder
    from k3tune.rl.engines.sglang import SglangDialect
    from k3tune.rl.engines.vllm import VllmDialect

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"engine is {rollout.engine!r} in a run of {torch.distributed.get_world_size()} "
            "processes, expected one: the others' clients would not know of its pushes; use the "
            "local engine"
        )
    assert rollout.engine_urls is not None, "the options were checked"
    architecture = base_of(model).model.architecture
    layers = None if rollout.routing == "ignore" else architecture.moe_layers
    dialect: Any = VllmDialect(moe_layers=layers)
    if rollout.engine == "sglang":
        width = architecture.num_experts_per_token
        dialect = SglangDialect(moe_layers=layers, num_experts_per_token=width)
    folder = output_dir.absolute() / "pushed"
    template = save_adapter(model, folder / "template", overwrite=True)
    layout: Any = rollout.engine
    dtype = getattr(torch, rollout.rollout_adapter_dtype)
    push_folder = PushFolder(folder, template, layout=layout, dtype=dtype)
    return HttpEngine(rollout.engine_urls, dialect, push_folder=push_folder)


def _local_engine(rollout: RolloutArguments, model: Any) -> RolloutEngine:
    from k3tune.rl.engines import LocalEngine
    from k3tune.rl.engines.continuous import alone

    parallel, trunk = expert_parallel_of(model), sharded_trunk(model)
    keep_stepping = alone if parallel is None else parallel.keep_stepping
    if trunk is not None:
        keep_stepping = trunk.keep_stepping
        logger.warning(
            "engine is local and the trunk is sharded: every sampled token of a batch gathers the "
            "whole trunk, %.3g GB over the links; an engine on a server of its own does not",
            trunk.gathered_bytes / 1e9,
        )
    return LocalEngine(
        model,
        max_batch_size=rollout.rollout_batch_size,
        activations=rollout.activations,  # type: ignore[arg-type]
        adapter_dtype=None if rollout.rollout_adapter_dtype == "float32" else "bfloat16",
        return_routing=rollout.routing != "ignore",
        keep_stepping=keep_stepping,
    )


def build_rewards(options: RewardArguments) -> list[GuardedReward]:
    """The reward functions, each held to its deadline.

    Raises:
        ConfigError: naming one that is not there.
    """
    return [
        GuardedReward(
            find_reward(name),
            reward_name(name),
            deadline_s=options.reward_deadline_s,
            skip_bad=options.on_bad_reward == "skip",
        )
        for name in options.rewards
    ]
