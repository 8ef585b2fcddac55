"""Kimi K3 with a sharded trunk: which modules are units, loading, groups of ranks, fingerprint."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from k3tune.errors import ConfigError
from k3tune.lora.fingerprint import digest_of, label_of
from k3tune.lora.inject import base_of
from k3tune.model import K3ForCausalLM, load_base
from k3tune.model.checkpoint import Piece
from k3tune.model.local_experts import Experts
from k3tune.parallel.trunk import TrunkShards

logger = logging.getLogger(__name__)

# Where the base keeps its shards; no module, so nothing of torch or transformers looks at it.
_ATTRIBUTE = "trunk_shards"
_DIGEST_BYTES = 32


def trunk_group(trunk_shard: str) -> dist.ProcessGroup | None:
    """The ranks the trunk is spread over, from the option of that name.

    Every process must call it.

    Args:
        trunk_shard: ``"none"``; ``"node"``; or how many processes in a row share a trunk.

    Returns:
        This process's group; None where it keeps the whole trunk.

    Raises:
        ConfigError: if the processes do not divide into such groups.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if trunk_shard == "none" or (trunk_shard == "node" and world == 1):
        return None
    size = _ranks_of_node() if trunk_shard == "node" else int(trunk_shard)
    if world % size:
        raise ConfigError(
            f"trunk_shard is {trunk_shard}, which spreads the trunk over {size} processes, and the "
            f"run has {world}: expected a size that divides them, node or none"
        )
    if size == 1:
        return None
    own, _ = dist.new_subgroups(size)
    return own


def _ranks_of_node() -> int:
    """Processes on this machine, as torchrun and accelerate, or DeepSpeed's launcher, say it."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    raise ConfigError(
        "trunk_shard is node, and the launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE: "
        "expected a launch by accelerate, torchrun or deepspeed; or give the number of processes "
        "on a machine"
    )


def shard_trunk(
    model: nn.Module, group: dist.ProcessGroup | None, *, device: torch.device | None = None
) -> TrunkShards:
    """Spread the trunk of a model that holds it whole, with or without adapters.

    The head, the final norm and the output mix stay; so do experts and adapters.

    Args:
        model: a frozen K3 model, or the PeftModel over one; changed in place.
        group: the ranks to spread over, all of which hold the same weights; None keeps all here.
        device: of shards and gathered weights; None is where the embedding is.

    Raises:
        ConfigError: if the base is not frozen, or its trunk is sharded already.
    """
    base = base_of(model)
    if sharded_trunk(base) is not None:
        raise ConfigError("the trunk is sharded already, expected a whole one: shard it once")
    if device is None:
        device = base.model.embed_tokens.weight.device
    layers = [(f"model.layers.{n}", layer) for n, layer in enumerate(base.model.layers)]
    units = [("model.embed_tokens", base.model.embed_tokens), *layers]
    shards = TrunkShards(base, units, group, device)
    vars(base)[_ATTRIBUTE] = shards
    logger.info(
        "trunk: %d units over %d processes, %d bytes on each",
        len(units),
        1 if group is None else dist.get_world_size(group),
        shards.resident_bytes,
    )
    return shards


def load_sharded_base(
    path: str | Path,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    experts: Experts | None = None,
    kernels: str = "auto",
) -> K3ForCausalLM:
    """:func:`~k3tune.load_base` with the trunk spread over ``group`` from the start.

    A process reads its own byte range of the trunk and no more, straight into its shard. Adapters
    are attached and loaded as to any base.

    Args:
        path, dtype, device, experts, kernels: as of ``load_base``.
        group: from :func:`trunk_group`.

    Raises:
        ConfigError, CheckpointError: as ``load_base`` does.
    """
    target = torch.get_default_device() if device is None else torch.device(device)

    def take(model: K3ForCausalLM) -> Mapping[str, Piece | None]:
        shards = shard_trunk(model, group, device=target)
        return {
            slot.name: None if piece is None else Piece(*piece)
            for unit in shards.units.values()
            for slot, piece in zip(unit.layout.slots, unit.pieces(), strict=True)
        }

    return load_base(path, dtype=dtype, device=target, experts=experts, kernels=kernels, take=take)


def sharded_trunk(model: nn.Module) -> TrunkShards | None:
    """The shards of a K3 model, or of the PeftModel over one; None where the trunk is whole."""
    shards = vars(base_of(model)).get(_ATTRIBUTE)
    assert shards is None or isinstance(shards, TrunkShards), f"{type(shards)=}"
    return shards


def trunk_digests(shards: TrunkShards) -> dict[str, str]:
    """SHA-256 of each sharded weight, as :func:`~k3tune.lora.fingerprint.base_digests` has them.

    Gathers every unit once; every rank of the group must call it, and hashes its share.

    Returns:
        ``"<parameter> <dtype> <shape>"`` -> hex digest, equal on all ranks.
    """
    found: dict[str, str] = {}
    for name, unit in shards.units.items():
        rows = torch.zeros(
            len(unit.layout.slots), _DIGEST_BYTES, dtype=torch.uint8, device=unit.shard.device
        )
        labels = []
        with shards.opened(name):
            for place, slot in enumerate(unit.layout.slots):
                module, attribute = slot.owners[0]
                labels.append(label_of(slot.name, getattr(module, attribute)))
                if place % unit.layout.ranks == unit.rank:
                    digest = bytes.fromhex(digest_of(getattr(module, attribute)))
                    rows[place] = torch.tensor(list(digest), dtype=torch.uint8)
        if unit.group is not None:
            # the others' rows are zero here
            dist.all_reduce(rows, group=unit.group)
        found |= {label: bytes(row.tolist()).hex() for label, row in zip(labels, rows, strict=True)}
    shards.drop_prefetch()
    return found
