"""Which rank holds which experts, and what that costs: arithmetic only, loads no torch.

A *rank* here is a place in an expert-parallel group, from 0; every group has the same shards. The
run, the placement search, the planner and the simulation all count with these functions.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from k3tune.errors import ConfigError
from k3tune.files import path_text, shown
from k3tune.published.architecture import GROUP_SIZE, Architecture
from k3tune.published.safetensors_files import read_json

FORMAT = 1
# Of a file; one rank more is one entry more in memory.
_MOST_EXPERTS = 1 << 20
INDEX_BYTES = 4
"""Bytes of a token's place, which deduplicated rows travel with."""
COUNT_BYTES = 8
"""Bytes of one number in the exchange of counts."""


@dataclass(frozen=True)
class ExpertShards:
    """The experts of every rank, the same number in every layer of a rank.

    Attributes:
        num_experts: experts a layer.
        num_ranks: ranks of an expert-parallel group.
        placed: layer -> rank of each expert, for layers whose experts were placed; the others are
            contiguous. A rank holds as many experts of a placed layer as of a contiguous one.
    """

    num_experts: int
    num_ranks: int
    placed: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= self.num_experts:
            raise ConfigError(
                f"expert_parallel_size is {self.num_ranks}, expected 1 to {self.num_experts}: the "
                f"base has {self.num_experts} experts a layer, and every rank holds one at least"
            )
        for layer, ranks in self.placed.items():
            self._check(layer, ranks)

    def ranks(self, layer: int) -> tuple[int, ...]:
        """The rank of each expert of a layer."""
        if layer in self.placed:
            return tuple(self.placed[layer])
        return tuple(rank for rank, size in enumerate(self.sizes) for _ in range(size))

    def experts(self, rank: int, layer: int) -> tuple[int, ...]:
        """Ids of a rank's experts, ascending: the order of its rows."""
        assert 0 <= rank < self.num_ranks, f"{rank=} {self.num_ranks=}"
        if layer in self.placed:
            return tuple(e for e, holder in enumerate(self.placed[layer]) if holder == rank)
        first = rank * self.num_experts // self.num_ranks
        return tuple(range(first, (rank + 1) * self.num_experts // self.num_ranks))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Experts a layer of each rank: equal, or one more on some where they do not divide."""
        edges = [rank * self.num_experts // self.num_ranks for rank in range(self.num_ranks + 1)]
        return tuple(end - begin for begin, end in pairwise(edges))

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return {
            "format": FORMAT,
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
            "ranks": {str(layer): list(ranks) for layer, ranks in sorted(self.placed.items())},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ExpertShards":
        """Shards of :meth:`to_json`.

        Raises:
            ConfigError: if the content is not that, or not an assignment.
        """
        if content.get("format") != FORMAT:
            raise ConfigError(
                f"a placement of format {content.get('format')!r}, expected {FORMAT}: make it with "
                "this k3tune"
            )
        wanted = "expected format, num_experts, num_ranks and ranks by layer"
        layers = content.get("ranks")
        if not isinstance(layers, Mapping):
            held = ", ".join(map(str, content))
            raise ConfigError(f"a placement with {path_text(held) or 'nothing'}, {wanted}")
        sizes: list[Any] = [content.get("num_experts"), content.get("num_ranks")]
        for size in sizes:
            if type(size) is not int or size > _MOST_EXPERTS:
                raise ConfigError(f"a placement of {shown(size)} experts or ranks, {wanted}")
        for layer, ranks in layers.items():
            if not is_layer(layer) or not isinstance(ranks, list | tuple):
                raise ConfigError(f"a placement with {shown(ranks)} at {shown(layer)}, {wanted}")
        return cls(
            sizes[0], sizes[1], {int(layer): tuple(ranks) for layer, ranks in layers.items()}
        )

    @classmethod
    def read(cls, path: str | Path) -> "ExpertShards":
        """Shards from a JSON file of :meth:`to_json`.

        Raises:
            ConfigError: if it cannot be read or holds no assignment.
        """
        file = Path(path)
        try:
            content = read_json(file.read_bytes(), file, ConfigError)
        except OSError as error:
            raise ConfigError(
                f"cannot read the placement {path_text(file)}: {error.strerror}"
            ) from error
        try:
            return cls.from_json(content)
        except ConfigError as error:
            raise ConfigError(f"{path_text(file)}: {error}") from error

    def _check(self, layer: int, ranks: Sequence[int]) -> None:
        if len(ranks) != self.num_experts:
            raise ConfigError(
                f"layer {layer} places {len(ranks)} experts, expected {self.num_experts}"
            )
        counts = [0] * self.num_ranks
        for rank in ranks:
            if type(rank) is not int or not 0 <= rank < self.num_ranks:
                raise ConfigError(
                    f"layer {layer} places an expert on rank {rank!r}, expected 0 to "
                    f"{self.num_ranks - 1}"
                )
            counts[rank] += 1
        if tuple(counts) != self.sizes:
            raise ConfigError(
                f"layer {layer} places {counts} experts on the ranks, expected "
                f"{list(self.sizes)}: every rank has room for as many as without a placement"
            )


def is_layer(text: Any) -> bool:
    """Whether a JSON key is a layer's number as it is written: no sign, no leading zero."""
    return isinstance(text, str) and re.fullmatch("0|[1-9][0-9]{0,5}", text) is not None


def expert_bytes(architecture: Architecture) -> int:
    """Packed bytes of one expert of one layer: payload and scales of w1, w3 and w2."""
    weights = 3 * architecture.routed_expert_hidden_size * architecture.moe_intermediate_size
    return weights // 2 + weights // GROUP_SIZE


def shard_bytes(architecture: Architecture, shards: ExpertShards, rank: int) -> int:
    """Packed bytes of a rank's experts over all layers."""
    layers = len(architecture.moe_layers)
    return layers * shards.sizes[rank] * expert_bytes(architecture)


def row_bytes(latent: int, value_bytes: int, *, mxfp8: bool = False) -> int:
    """Bytes of one latent on the wire.

    Args:
        latent: its width.
        value_bytes: bytes of a value in the model's dtype.
        mxfp8: one byte a value and one a group of 32 instead.
    """
    return latent + latent // GROUP_SIZE if mxfp8 else latent * value_bytes


@dataclass(frozen=True)
class LayerTraffic:
    """Bytes that one rank hands to the exchange of one layer, those to itself included.

    Attributes:
        counts: tokens a rank and expert.
        dispatch: latents on the way to the experts, with their places where deduplicated.
        combine: experts' outputs on the way back.
        gradients: both directions of the backward.
        messages: exchanges times the other ranks.
    """

    counts: int
    dispatch: int
    combine: int
    gradients: int
    messages: int

    @property
    def forward(self) -> int:
        """Bytes of a forward."""
        return self.counts + self.dispatch + self.combine

    @property
    def total(self) -> int:
        """Bytes of a forward and a backward; a recomputed layer adds another forward."""
        return self.forward + self.gradients


def layer_traffic(
    shards: ExpertShards,
    *,
    latent: int,
    value_bytes: int,
    rows: int,
    unique_rows: int | None = None,
    mxfp8: bool = False,
) -> LayerTraffic:
    """What a rank sends in one layer.

    Args:
        shards: of the group.
        latent: width of a row.
        value_bytes: bytes of a value in the model's dtype.
        rows: (token, expert) pairs of this rank, or, on the way back, the same number.
        unique_rows: (token, rank) pairs where a token crosses once to each rank; None: it crosses
            once to each expert.
        mxfp8: whether latents travel as MXFP8 on the way to the experts.
    """
    value = row_bytes(latent, value_bytes)
    sent = rows if unique_rows is None else unique_rows
    places = 0 if unique_rows is None else rows * INDEX_BYTES
    count_fields = max(shards.sizes) + (unique_rows is not None)
    # counts, latents and outputs forward, two gradients backward; places where deduplicated
    exchanges = 5 + (unique_rows is not None)
    return LayerTraffic(
        counts=shards.num_ranks * count_fields * COUNT_BYTES,
        dispatch=sent * row_bytes(latent, value_bytes, mxfp8=mxfp8) + places,
        combine=rows * value,
        gradients=rows * value + sent * value,
        messages=exchanges * (shards.num_ranks - 1),
    )


def expected_ranks_per_token(num_experts_per_token: int, shards: ExpertShards) -> float:
    """Mean number of ranks a token's experts fall on, were all sets of experts equally likely."""
    total = math.comb(shards.num_experts, num_experts_per_token)
    return sum(
        1 - math.comb(shards.num_experts - size, num_experts_per_token) / total
        for size in shards.sizes
    )
