"""The choices a plan is made for: devices, splits, tokens a step, checkpointing. All checked."""

from dataclasses import dataclass
from typing import Any

from k3tune.errors import ConfigError
from k3tune.files import shown
from k3tune.plan.sizes import DTYPE_BYTES

ZERO_STAGES = (0, 1, 2)
MOST_PER_NODE = 1024
"""Devices of a node; no fast domain comes near it, and every divisor of it is tried."""

_MOST = 2**31 - 1
_MOST_DIGITS = 10

_ZERO_3 = (
    "zero_stage is 3, expected 0, 1 or 2: stage 3 would gather the packed experts of every layer "
    "on every GPU; trunk_shard shards what is not an expert"
)
_ZERO_0 = (
    "zero_stage is 0 and expert_parallel_size is {size}, expected stage 1 or 2 with expert "
    "parallelism: without ZeRO the gradient would be clipped by each rank's own norm"
)


@dataclass(frozen=True)
class Layout:
    """How a run is spread over devices, and what one of them works on at a time.

    Attributes:
        gpus: processes, one a device.
        gpus_per_node: of them on one node.
        expert_parallel_size: ranks that share a layer's experts; divides ``gpus``.
        zero_stage: of DeepSpeed; 0 is a launch without it.
        trunk_ranks: ranks that share the trunk's decoder layers and embedding; 1: each has all.
        sequence_length: tokens of a row.
        micro_batch: rows of a forward.
        activation_checkpointing: whether a layer's activations are computed again for its backward.
        dtype: the trunk's.
    """

    gpus: int = 1
    gpus_per_node: int = 8
    expert_parallel_size: int = 1
    zero_stage: int = 0
    trunk_ranks: int = 1
    sequence_length: int = 4096
    micro_batch: int = 1
    activation_checkpointing: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_count("gpus_per_node", self.gpus_per_node, most=MOST_PER_NODE)
        for name in (
            "gpus",
            "expert_parallel_size",
            "trunk_ranks",
            "sequence_length",
            "micro_batch",
        ):
            check_count(name, getattr(self, name))
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        if self.zero_stage == 3:
            raise ConfigError(_ZERO_3)
        if self.zero_stage not in ZERO_STAGES:
            raise ConfigError(f"zero_stage is {self.zero_stage!r}, expected 0, 1 or 2")
        if self.expert_parallel_size > 1 and self.zero_stage == 0:
            raise ConfigError(_ZERO_0.format(size=self.expert_parallel_size))
        groups = {
            "expert_parallel_size": self.expert_parallel_size,
            "trunk_shard": self.trunk_ranks,
        }
        for name, ranks in groups.items():
            if self.gpus % ranks:
                raise ConfigError(
                    f"{name} is of {ranks} ranks on {self.gpus} GPUs, expected a divisor of the "
                    "number of GPUs: groups have the same size"
                )

    @property
    def tokens(self) -> int:
        """Tokens of a rank's forward."""
        return self.sequence_length * self.micro_batch

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts, over which their factors are averaged."""
        return self.gpus // self.expert_parallel_size

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.dtype]


def check_count(name: str, value: Any, most: int = _MOST) -> None:
    """Refuse anything but an integer from 1 to ``most``: larger ones overflow a float, or loop.

    Raises:
        ConfigError: naming the option and what it holds.
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(
            f"{name} is {shown(value)}, expected an integer of at least 1 and at most {most}"
        )


def trunk_group(trunk_shard: Any, gpus: int, gpus_per_node: int) -> int:
    """Ranks that share the trunk.

    Args:
        trunk_shard: ``"none"``, ``"node"`` (the ranks of one node) or a number of ranks.
        gpus, gpus_per_node: of the run.

    Raises:
        ConfigError: if it is none of these.
    """
    if trunk_shard == "none":
        return 1
    if trunk_shard == "node":
        return min(gpus, gpus_per_node)
    text = str(trunk_shard)
    number = len(text) <= _MOST_DIGITS and text.isdecimal()
    if isinstance(trunk_shard, bool) or not number or int(text) < 1:
        raise ConfigError(
            f"trunk_shard is {shown(trunk_shard)}, expected none, node or a number of ranks"
        )
    return int(text)


def largest_expert_parallel_size(gpus: int, num_experts: int) -> int:
    """The most ranks that can share the experts evenly: divides the GPUs and the experts."""
    sizes = (size for size in range(min(gpus, num_experts), 0, -1) if gpus % size == 0)
    return next(size for size in sizes if num_experts % size == 0)
