"""Expert parallelism from outside the model: its experts' calls, its parameters' marks.

The model is loaded with one rank's experts (:meth:`ExpertParallel.experts`), an adapter is attached
as ever, and :meth:`ExpertParallel.attach` does the rest. DeepSpeed then averages gradients of
marked parameters over their replicas, those of all others over the run. A shared-outer factor is
not marked: its gradient on a rank is the part of the experts there, and the sum of the parts over
ranks, averaged over data, is what DeepSpeed's mean over all processes makes of it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3tune.errors import ConfigError, K3TuneError
from k3tune.lora.inject import base_of
from k3tune.lora.layers import LoraPackedProjection
from k3tune.lora.targets import layer_of
from k3tune.model.latent_moe import PackedProjection, RoutedExperts
from k3tune.model.modeling import K3ForCausalLM
from k3tune.parallel.dispatch import DispatchOptions, ExpertDispatch
from k3tune.parallel.groups import ExpertGroup, expert_group
from k3tune.parallel.shards import ExpertShards
from k3tune.parallel.traffic import Traffic
from k3tune.published.architecture import Architecture

logger = logging.getLogger(__name__)

ZERO_STAGES = (1, 2)
_ZERO_REASONS = {
    0: "it clips by the norm of one rank's experts alone",
    3: "it would average the gradients of different experts, without a word",
}


class ExpertParallel:
    """One run's expert parallelism on this process.

    Attributes:
        group: this process's group.
        shards: which rank holds which experts.
        traffic: what the exchanges carried.
    """

    def __init__(self, shards: ExpertShards, options: DispatchOptions | None = None) -> None:
        """Make the groups; every process must do it.

        Args:
            shards: which rank holds which experts; its ranks are the size of a group.
            options: how latents travel.

        Raises:
            ConfigError: if the processes launched cannot be split so.
        """
        self.shards = shards
        self.group: ExpertGroup = expert_group(shards.num_ranks)
        self.traffic = Traffic()
        self._options = options or DispatchOptions()
        self._device = torch.device("cpu")

    def experts(self, layers: range) -> dict[int, tuple[int, ...]]:
        """By layer, the ids of this rank's experts, for :func:`k3tune.load_base`."""
        return {layer: self.shards.experts(self.group.rank, layer) for layer in layers}

    def attach(self, model: nn.Module) -> None:
        """Dispatch the experts of a model, mark its parameters, and show DeepSpeed that it has any.

        Args:
            model: a base loaded with :meth:`experts`, or the PeftModel over it; changed in place.

        Raises:
            ConfigError: if its experts are not this rank's, or it is attached already.
        """
        base = base_of(model)
        if base in _ATTACHED:
            raise ConfigError("the model is expert parallel already: load another")
        for name, module in _routed_experts(base):
            layer = layer_of(name)
            assert layer is not None, f"{name=}"
            self._check(name, module, layer)
            _check_ranks(name, module)
            module.forward = ExpertDispatch(  # type: ignore[method-assign]
                module, layer, self.shards, self.group, self._options, self.traffic
            )
        self._device = base.device
        base.add_module("expert_parallel_marker", _marker(self.group, self.shards.num_experts))
        _ATTACHED[base] = self
        self.mark(model)
        logger.info(
            "expert parallel: %d groups of %d processes, each with %s of %d experts a layer",
            self.group.replicas,
            self.group.size,
            "/".join(str(size) for size in sorted(set(self.shards.sizes))),
            self.shards.num_experts,
        )

    def mark(self, model: nn.Module) -> None:
        """Mark packed experts and their own factors, of every adapter there is now.

        DeepSpeed would overwrite unmarked ones with the first process's when it starts. Adapters
        may replace parameters, so this is called again right before that.
        """
        for parameter in expert_parameters(base_of(model)):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = self.group.name  # type: ignore[attr-defined]

    @contextmanager
    def starting_engine(self, model: nn.Module) -> Iterator[None]:
        """A block in which DeepSpeed starts: marks are set before, bytes are compared after.

        Raises:
            K3TuneError: if the packed experts are no longer what they were.
        """
        self.mark(model)
        before = checksum(base_of(model))
        yield
        if not torch.equal(checksum(base_of(model)), before):
            raise K3TuneError(
                f"DeepSpeed changed the packed experts of rank {self.group.rank} when it started, "
                "expected it to leave them alone: is this the version of DeepSpeed that k3tune "
                "asks for?"
            )

    def keep_stepping(self, works: bool) -> bool:
        """Whether any process of the group has work left, asked by all of them before a forward.

        While one has, the others must run a forward too: it would wait for their experts.

        Args:
            works: whether this process has work.
        """
        flag = torch.tensor(int(works), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group.handle)
        return bool(flag)

    def _check(self, name: str, module: RoutedExperts, layer: int) -> None:
        expected = list(self.shards.experts(self.group.rank, layer))
        found = None if module.local_experts is None else module.local_experts.tolist()
        if found != expected:
            shown = "all" if found is None else found
            raise ConfigError(
                f"{name} holds experts {shown}, expected {expected} on rank {self.group.rank} of "
                f"{self.group.size}: load the base with the experts of this rank"
            )


def choose_shards(
    architecture: Architecture, size: int, placement: str | Path | None = None
) -> ExpertShards:
    """The shards of a run: experts in a row, or as a file says.

    Args:
        architecture: of the base.
        size: ranks of an expert-parallel group.
        placement: a file of :meth:`~k3tune.parallel.shards.ExpertShards.to_json`.

    Raises:
        ConfigError: if there are more ranks than experts, or the file is for another base or size.
    """
    if placement is None:
        return ExpertShards(architecture.num_experts, size)
    shards = ExpertShards.read(placement)
    found = shards.num_experts, shards.num_ranks
    layers = set(shards.placed) - set(architecture.moe_layers)
    if found != (architecture.num_experts, size) or layers:
        raise ConfigError(
            f"{placement} places {found[0]} experts on {found[1]} ranks"
            + (f", also in layer {min(layers)}, which has none" if layers else "")
            + f", expected {architecture.num_experts} experts and expert_parallel_size {size}: "
            "make one for this base and size, or leave expert_placement out"
        )
    return shards


_ATTACHED: WeakKeyDictionary[K3ForCausalLM, ExpertParallel] = WeakKeyDictionary()


def expert_parallel_of(model: nn.Module) -> ExpertParallel | None:
    """The expert parallelism attached to a model or the PeftModel over it; None without."""
    return _ATTACHED.get(base_of(model))


def check_zero(stage: int, size: int) -> None:
    """Refuse a ZeRO stage under which experts would be trained wrongly.

    Raises:
        ConfigError: with the reason.
    """
    if stage not in ZERO_STAGES:
        raise ConfigError(
            f"zero_stage is {stage}, expected 1 or 2 with expert_parallel_size {size}: "
            f"{_ZERO_REASONS[stage]}"
        )


def split_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups split as DeepSpeed asks: marked parameters apart, under its name for them.

    Args:
        groups: with ``params``, ``name`` and whatever else, which every part keeps.
    """
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    parts = split_params_into_different_moe_groups_for_optimizer(groups)
    return [part for part in parts if part["params"]]


def expert_parameters(base: K3ForCausalLM) -> Iterator[nn.Parameter]:
    """Parameters of which every rank has its own: packed experts, and factors with a row each."""
    for _, experts in _routed_experts(base):
        for projection in (experts.w1, experts.w3, experts.w2):
            packed: Any = projection
            if isinstance(projection, LoraPackedProjection):
                packed = projection.get_base_layer()
                yield from own_factors(projection).values()
            assert isinstance(packed, PackedProjection), f"{type(packed)=}"
            yield from packed.parameters(recurse=False)


def own_factors(
    layer: LoraPackedProjection, adapter_name: str | None = None
) -> dict[tuple[str, str], nn.Parameter]:
    """Factors with a row an expert by adapter and half; those that experts share are left out."""
    return {
        (name, half): layer.factor(name, half)
        for name in layer.lora_A
        if adapter_name in (None, name)
        for half in "AB"
        if half not in layer.shared.get(name, "")
    }


def checksum(base: K3ForCausalLM) -> Tensor:
    """An int64 over this rank's packed bytes, without a copy of them; changes with any of them.

    Sums of 64-bit words by parameter, mixed in order: enough to see bytes replaced by other
    experts', not a cryptographic hash.
    """
    total = torch.zeros((), dtype=torch.int64)
    for parameter in expert_parameters(base):
        if parameter.dtype == torch.uint8:
            words = parameter.detach().flatten()
            tail = len(words) % 8
            value = words[: len(words) - tail].view(torch.int64).sum()
            value += words[len(words) - tail :].sum()
            total = total * 1_000_003 + value.cpu()
    return total


def _routed_experts(base: K3ForCausalLM) -> Iterator[tuple[str, RoutedExperts]]:
    for name, module in base.named_modules():
        if isinstance(module, RoutedExperts):
            yield name, module


def _check_ranks(name: str, experts: RoutedExperts) -> None:
    for projection in (experts.w1, experts.w3, experts.w2):
        if isinstance(projection, LoraPackedProjection) and projection.expert_ranks:
            raise ConfigError(
                f"the adapter's experts at {name} differ in rank or alpha, expected the same for "
                "all under expert parallelism: train it with expert_parallel_size 1"
            )


def _marker(group: ExpertGroup, num_experts: int) -> nn.Module:
    """What makes DeepSpeed reduce experts' gradients in their groups: a layer of its own class.

    It holds nothing and is never called.
    """
    from deepspeed.moe.layer import MoE

    class ExpertParallelMarker(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts, self.ep_size = num_experts, group.size
            self.expert_group_name = group.name

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            if use_data_before_expert_parallel_:
                raise ConfigError(
                    "DeepSpeed's use_data_before_expert_parallelism is on, expected off: the "
                    "base's experts are loaded by the other order of processes"
                )

    return ExpertParallelMarker()
