"""From options to what the trainer takes: the engine and the rewards."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3tune.arguments import RewardArguments, RolloutArguments
from k3tune.lora import save_adapter
from k3tune.lora.inject import DEFAULT_ADAPTER, base_of
from k3tune.parallel.expert_parallel import expert_parallel_of
from k3tune.parallel.gather import FactorRows
from k3tune.parallel.trunk_loading import sharded_trunk
from k3tune.rl.guarded import GuardedReward
from k3tune.rl.rewards import find_reward, reward_name
from k3tune.rl.rollout import RolloutEngine

if TYPE_CHECKING:
    from k3tune.rl.engines.replicas import HttpEngine
    from k3tune.rl.engines.replicas_push import PushFolder
    from k3tune.rl.engines.replicas_shared import SharedHttpEngine
    from k3tune.rl.grpo import K3GRPOTrainer

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
    engine = _http_engine(rollout, model, Path(output_dir))
    if not rollout.overlap:
        return engine
    from k3tune.rl.overlap import OverlappedEngine

    return OverlappedEngine(engine)


def trainer_class(rollout: RolloutArguments) -> "type[K3GRPOTrainer]":
    """The trainer that goes with :func:`build_engine`'s engine.

    Args:
        rollout: the run's options.
    """
    from k3tune.rl.grpo import K3GRPOTrainer
    from k3tune.rl.overlap import OverlappedGRPOTrainer

    return OverlappedGRPOTrainer if rollout.overlap else K3GRPOTrainer


def _http_engine(
    rollout: RolloutArguments, model: Any, output_dir: Path
) -> "HttpEngine | SharedHttpEngine":
    from k3tune.rl.engines.replicas import HttpEngine
    from k3tune.rl.engines.replicas_shared import SharedHttpEngine
    from k3tune.rl.engines.sglang import SglangDialect
    from k3tune.rl.engines.vllm import VllmDialect

    assert rollout.engine_urls is not None, "the options were checked"
    architecture = base_of(model).model.architecture
    layers = None if rollout.routing == "ignore" else architecture.moe_layers
    dialect: Any = VllmDialect(moe_layers=layers)
    if rollout.engine == "sglang":
        width = architecture.num_experts_per_token
        dialect = SglangDialect(moe_layers=layers, num_experts_per_token=width)
    distributed = torch.distributed
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    pushes = not several or distributed.get_rank() == 0
    push_folder = _push_folder(rollout, model, output_dir) if pushes else None
    engine = HttpEngine(rollout.engine_urls, dialect, push_folder=push_folder)
    return SharedHttpEngine(engine) if several else engine


def _push_folder(rollout: RolloutArguments, model: Any, output_dir: Path) -> "PushFolder":
    """Where pushes go; its template needs the factors' shapes alone."""
    from k3tune.rl.engines.replicas_push import PushFolder

    folder = output_dir.absolute() / "pushed"
    parallel = expert_parallel_of(model)
    gather = None
    if parallel is not None:
        gather = _Shapes(FactorRows(parallel, model, DEFAULT_ADAPTER))
    # the run hashes its base once, when it begins
    template = save_adapter(
        model, folder / "template", overwrite=True, base_fingerprint="unknown", gather=gather
    )
    layout: Any = rollout.engine
    dtype = getattr(torch, rollout.rollout_adapter_dtype)
    return PushFolder(folder, template, layout=layout, dtype=dtype)


class _Shapes:
    """Whole factors of zeros, for a template that one process writes without the others."""

    writes = True

    def __init__(self, rows: FactorRows) -> None:
        self.whole_shape = rows.whole_shape

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Zeros in the shape of the whole factor."""
        return value.new_zeros(self.whole_shape(name, value.shape))


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
