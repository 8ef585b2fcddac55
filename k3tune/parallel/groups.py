"""DeepSpeed's expert-parallel groups: which processes share one set of experts."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from k3tune.errors import ConfigError


@dataclass(frozen=True)
class ExpertGroup:
    """The processes that hold one set of experts together; processes in a row form a group.

    Attributes:
        name: DeepSpeed's name of it, which parameters of experts carry.
        size: number of its processes.
        rank: this process's place in it.
        replicas: number of such groups in the run; each expert is held once in every one.
        handle: torch's process group.
        is_first: whether this group holds the run's first process, which writes files.
    """

    name: str
    size: int
    rank: int
    replicas: int
    handle: Any
    is_first: bool


def check_world(size: int) -> None:
    """Refuse an expert-parallel size that this launch cannot have.

    Raises:
        ConfigError: with what was launched and what to do.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"expert_parallel_size is {size}, but this is a single process: launch with accelerate "
            "and a config file of distributed_type DEEPSPEED, such as recipes/accelerate/zero2.yaml"
        )
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(
            f"expert_parallel_size is {size}, expected a divisor of the {world} processes launched"
        )


def expert_group(size: int) -> ExpertGroup:
    """Make the groups of ``size`` processes, or find them made; every process must call it.

    Raises:
        ConfigError: if the processes cannot be split so.
    """
    check_world(size)
    import deepspeed
    from deepspeed.utils import groups

    if not deepspeed.comm.is_initialized():
        # takes over the process group that torch has
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    return ExpertGroup(
        name=name,
        size=size,
        rank=groups._get_expert_parallel_rank(name),
        replicas=groups._get_expert_data_parallel_world_size(name),
        handle=groups._get_expert_parallel_group(name),
        is_first=0 in groups._get_expert_parallel_group_ranks(name),
    )
