"""The cheapest layout that fits: every split of every GPU count, fewest GPUs first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from k3tune.errors import ConfigError
from k3tune.plan.layout import Layout

if TYPE_CHECKING:
    from k3tune.plan.planning import Planner, Wishes


def cheapest(planner: "Planner", wishes: "Wishes", most_gpus: int) -> tuple["Wishes", Layout]:
    """The fewest GPUs that hold the run, and the split of them with the shortest step.

    Free is what the wishes leave open of the expert-parallel size, sharding of the trunk (none,
    node, all), and whether activations are computed again.

    Args:
        planner: of base, adapter and device.
        wishes: what is not free.
        most_gpus: not to be exceeded.

    Returns:
        The wishes that give the layout, and the layout.

    Raises:
        ConfigError: if nothing fits.
    """
    from k3tune.plan.planning import gpu_counts

    hardware = planner.hardware
    for gpus in gpu_counts(wishes.per_node(hardware), most_gpus):
        fitting = [
            (planner.step(layout)[1].step_s, number, option, layout)
            for number, (option, layout) in enumerate(_splits(planner, wishes, gpus))
            if planner.fits(layout)
        ]
        if fitting:
            # the number decides between equals, and keeps wishes from being compared
            _, _, option, layout = min(fitting, key=lambda found: found[:2])
            return option, layout
    raise ConfigError(
        f"no layout fits on up to {most_gpus} of {hardware.name}, expected one that does: allow "
        "more GPUs, or lower sequence_length, micro_batch or the LoRA rank"
    )


def _splits(planner: "Planner", wishes: "Wishes", gpus: int) -> Iterator[tuple["Wishes", Layout]]:
    experts = planner.architecture.num_experts
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0 and experts % n == 0]
    if wishes.expert_parallel_size is not None:
        sizes = [wishes.expert_parallel_size]
    shards: tuple[str | int, ...] = ("none", "node", gpus)
    if wishes.trunk_shard is not None:
        shards = (wishes.trunk_shard,)
    checkpointing = wishes.activation_checkpointing
    recomputing = (False, True) if checkpointing is None else (checkpointing,)
    for size in sizes:
        for shard in shards:
            for again in recomputing:
                option = replace(
                    wishes,
                    expert_parallel_size=size,
                    trunk_shard=shard,
                    activation_checkpointing=again,
                )
                try:
                    yield option, option.layout(gpus, experts, planner.hardware)
                except ConfigError:
                    # this split is impossible on so many GPUs
                    continue
