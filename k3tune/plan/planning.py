"""``k3tune.plan.plan``: from a config and a choice of devices to everything a run needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from k3tune.errors import ConfigError
from k3tune.lora.spec import LoraSpec
from k3tune.parallel.shards import ExpertShards
from k3tune.plan.activations import Activations, activations
from k3tune.plan.adapter import AdapterSize, adapter_size
from k3tune.plan.hardware import Hardware, find_hardware
from k3tune.plan.layout import (
    MOST_PER_NODE,
    Layout,
    check_count,
    largest_expert_parallel_size,
    trunk_group,
)
from k3tune.plan.memory import bf16_trainer_bytes, bytes_of_rank
from k3tune.plan.roofline import StepTime, step_time
from k3tune.plan.sizes import BaseBytes, base_bytes, count_parameters
from k3tune.plan.traffic import (
    DecodeRead,
    ModelRead,
    StepTraffic,
    decode_reads,
    model_reads,
    step_traffic,
)
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.hub import resolve_checkpoint

DEFAULT_TARGETS = ("attention", "latent", "experts", "shared_experts")
# K3's adapters are planned with the form its recipe trains.
DEFAULT_LORA = LoraSpec(DEFAULT_TARGETS, form="shared_outer")
# So many nodes are tried: beyond one expert a rank little gets smaller.
_MOST_NODES = 128


@dataclass(frozen=True)
class Wishes:
    """What a layout is made from; None lets the plan choose.

    Attributes:
        expert_parallel_size: None: the most ranks that share the experts evenly.
        trunk_shard: ``"none"``, ``"node"`` or a number of ranks; None: ``"node"``.
        zero_stage: None: 2 on several GPUs, 0 on one.
        gpus_per_node: None: the hardware's.
        activation_checkpointing: None: on.
        sequence_length, micro_batch, dtype: as in :class:`Layout`.
    """

    expert_parallel_size: int | None = None
    trunk_shard: str | int | None = None
    zero_stage: int | None = None
    gpus_per_node: int | None = None
    sequence_length: int = 2048
    micro_batch: int = 1
    activation_checkpointing: bool | None = None
    dtype: str = "bfloat16"

    def layout(self, gpus: int, num_experts: int, hardware: Hardware) -> Layout:
        """The layout on so many GPUs.

        Raises:
            ConfigError: if they cannot be split as wished.
        """
        check_count("gpus", gpus)
        per_node = self.per_node(hardware)
        size, stage, shard = self.expert_parallel_size, self.zero_stage, self.trunk_shard
        if size is None:
            size = largest_expert_parallel_size(gpus, num_experts)
        again = self.activation_checkpointing
        return Layout(
            gpus=gpus,
            gpus_per_node=per_node,
            expert_parallel_size=size,
            zero_stage=(2 if gpus > 1 else 0) if stage is None else stage,
            trunk_ranks=trunk_group("node" if shard is None else shard, gpus, per_node),
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            activation_checkpointing=True if again is None else again,
            dtype=self.dtype,
        )

    def per_node(self, hardware: Hardware) -> int:
        """Devices of a node.

        Raises:
            ConfigError: if there are none, or absurdly many.
        """
        if self.gpus_per_node is None:
            return hardware.gpus_per_node
        check_count("gpus_per_node", self.gpus_per_node, most=MOST_PER_NODE)
        return self.gpus_per_node


@dataclass(frozen=True)
class Plan:
    """What a run needs. Bytes are of the fullest rank.

    Attributes:
        source: where the config comes from.
        architecture: of the base.
        parameters: by part, ``total`` and ``active``.
        base: bytes of the loaded base.
        adapter: its numbers.
        lora: what is adapted.
        hardware, layout: of the run.
        bytes_per_rank: by part, and ``total``.
        activations: with and without checkpointing.
        bf16_trainer_bytes_per_rank: the same, were the experts decoded.
        fits: whether the total is within the device's memory.
        smallest_fit: fewest GPUs of this kind that hold the run, split as wished; None: none does.
        bf16_smallest_fit: the same with decoded experts.
        traffic: of a step.
        step: its roofline.
        decode, reads: what decoding reads, of a MoE layer and of the model.
    """

    source: str
    architecture: Architecture
    parameters: dict[str, int]
    base: BaseBytes
    adapter: AdapterSize
    lora: LoraSpec
    hardware: Hardware
    layout: Layout
    bytes_per_rank: dict[str, int]
    activations: Activations
    bf16_trainer_bytes_per_rank: int
    fits: bool
    smallest_fit: int | None
    bf16_smallest_fit: int | None
    traffic: StepTraffic
    step: StepTime
    decode: list[DecodeRead]
    reads: list[ModelRead]


class Planner:
    """Plans for one base and adapter on one kind of device.

    Raises:
        ConfigError, AdapterError: if the config is not K3's, or the adapter fits nothing of it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        lora: LoraSpec,
        hardware: Hardware,
        *,
        source: str,
        imbalance: float,
    ) -> None:
        self.source, self.lora, self.hardware = source, lora, hardware
        self.architecture = parse_config(config)
        check_imbalance(imbalance, self.architecture.num_experts)
        self.imbalance = float(imbalance)
        self.parameters = count_parameters(self.architecture, config.get("vision_config"))
        self.adapter = adapter_size(self.architecture, lora)
        self._bases: dict[str, BaseBytes] = {}
        self._activations: dict[tuple[int, int, str], Activations] = {}

    def base(self, dtype: str = "bfloat16") -> BaseBytes:
        """Bytes of the base with its trunk in ``dtype``."""
        if dtype not in self._bases:
            self._bases[dtype] = base_bytes(self.architecture, dtype)
        return self._bases[dtype]

    def activations(self, layout: Layout) -> Activations:
        """A rank's activations, which depend on its tokens alone."""
        key = layout.sequence_length, layout.micro_batch, layout.dtype
        if key not in self._activations:
            self._activations[key] = activations(
                self.architecture, layout, self.adapter.ranks, fused=not self.hardware.is_cpu
            )
        return self._activations[key]

    def memory(self, layout: Layout) -> dict[str, int]:
        """Bytes of the fullest rank, by part."""
        return bytes_of_rank(
            self.architecture,
            self.base(layout.dtype),
            self.adapter,
            layout,
            fused=not self.hardware.is_cpu,
            imbalance=self.imbalance,
            held=self.activations(layout),
        )

    def fits(self, layout: Layout) -> bool:
        """Whether the fullest rank's bytes are within a device's memory."""
        return self.memory(layout)["total"] <= self.hardware.memory_bytes

    def smallest_fit(self, wishes: Wishes, *, decoded: bool = False) -> int | None:
        """Fewest GPUs that hold the run, or with ``decoded`` one whose experts are BF16."""
        for gpus in gpu_counts(wishes.per_node(self.hardware)):
            try:
                layout = wishes.layout(gpus, self.architecture.num_experts, self.hardware)
            except ConfigError:
                # so many GPUs cannot be split as wished
                continue
            parts = self.memory(layout)
            needed = bf16_trainer_bytes(parts) if decoded else parts["total"]
            if needed <= self.hardware.memory_bytes:
                return gpus
        return None

    def step(self, layout: Layout) -> tuple[StepTraffic, StepTime]:
        """Traffic and roofline of a layout's step."""
        shards = ExpertShards(self.architecture.num_experts, layout.expert_parallel_size)
        factors, base = self.adapter.of_rank(shards), self.base(layout.dtype)
        traffic = step_traffic(self.architecture, base, factors, layout)
        time = step_time(
            self.architecture,
            base,
            self.parameters["active"],
            factors,
            traffic,
            layout,
            self.hardware,
            self.imbalance,
        )
        return traffic, time

    def plan(self, wishes: Wishes, layout: Layout) -> Plan:
        """Everything about a layout; ``wishes`` say how other GPU counts would be split."""
        a = self.architecture
        base, stored = self.base(layout.dtype), self.base()
        parts = self.memory(layout)
        traffic, time = self.step(layout)
        decode = decode_reads(a, base)
        text = self.parameters["total"] - self.parameters["vision"]
        return Plan(
            source=self.source,
            architecture=a,
            parameters=self.parameters,
            base=base,
            adapter=self.adapter,
            lora=self.lora,
            hardware=self.hardware,
            layout=layout,
            bytes_per_rank=parts,
            activations=self.activations(layout),
            bf16_trainer_bytes_per_rank=bf16_trainer_bytes(parts),
            fits=parts["total"] <= self.hardware.memory_bytes,
            smallest_fit=self.smallest_fit(wishes),
            bf16_smallest_fit=self.smallest_fit(wishes, decoded=True),
            traffic=traffic,
            step=time,
            decode=decode,
            reads=model_reads(
                a,
                base,
                decode,
                active=self.parameters["active"],
                bytes_per_parameter=(stored.experts + stored.trunk) / text,
            ),
        )


def plan(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    gpu: str | Hardware = "h200",
    gpus: int = 16,
    lora: LoraSpec = DEFAULT_LORA,
    wishes: Wishes | None = None,
    imbalance: float = 1.0,
    search: bool = False,
) -> Plan:
    """What a LoRA run on K3 needs on given devices, from the config alone.

    Args:
        config: a parsed ``config.json``, its folder, or a hub id of which it is downloaded; None:
            K3 as published.
        gpu: a device of :func:`~k3tune.plan.hardware.known_hardware`, or one made of it.
        gpus: how many; with ``search`` the most.
        lora: what is adapted.
        wishes: how the run is split; None: all its defaults.
        imbalance: rows of the busiest rank over the mean, given or measured.
        search: take the cheapest layout that fits: fewest GPUs first, then the shortest step; the
            splits that ``wishes`` leave open are free.

    Raises:
        ConfigError: if the config is not K3's, a figure is unusable, the split is impossible, or
            the search finds nothing.
        AdapterError: if the adapter fits nothing of the base.
    """
    from k3tune.plan.search import cheapest

    hardware = gpu if isinstance(gpu, Hardware) else find_hardware(gpu)
    wishes = wishes or Wishes()
    content, source = _config(config)
    planner = Planner(content, lora, hardware, source=source, imbalance=imbalance)
    if search:
        wishes, layout = cheapest(planner, wishes, gpus)
    else:
        layout = wishes.layout(gpus, planner.architecture.num_experts, hardware)
        check_imbalance(imbalance, layout.expert_parallel_size)
    return planner.plan(wishes, layout)


def check_imbalance(imbalance: float, ranks: int) -> None:
    """Refuse what no distribution of rows over so many ranks has.

    Raises:
        ConfigError: if it is below 1, or the busiest rank would have more than all rows.
    """
    if isinstance(imbalance, bool) or not 1 <= imbalance <= ranks:
        raise ConfigError(
            f"imbalance is {imbalance!r}, expected a number from 1 on and at most {ranks}, the "
            "ranks that share the experts: the busiest rank's rows over the mean"
        )


def published_config() -> dict[str, Any]:
    """The sizes of Moonshot's ``config.json``, shipped with k3tune."""
    return read_config(Path(str(resources.files("k3tune") / "assets" / "kimi-k3")))


def gpu_counts(gpus_per_node: int, most: int | None = None) -> list[int]:
    """Counts worth a try: parts of a node that halve it, then whole nodes."""
    parts = [n for n in range(1, gpus_per_node) if gpus_per_node % n == 0]
    nodes = [n * gpus_per_node for n in range(1, _MOST_NODES + 1)]
    return [count for count in parts + nodes if most is None or count <= most]


def _config(config: str | Path | Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, "the config given"
    if config is None:
        return published_config(), "Kimi K3 as published"
    return read_config(resolve_checkpoint(config, weights=False)), str(config)
