"""What a base holds, by part and by layer, from its config: parameters and bytes."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from k3tune.lora.targets import layer_of
from k3tune.published.architecture import Architecture
from k3tune.published.tensor_table import (
    TensorSpec,
    active_parameters,
    parameter_count,
    text_tensors,
    vision_tensors,
)

PARTS = (
    "routed_experts",
    "latent_projections",
    "shared_experts",
    "embedding_and_head",
    "attention",
    "dense_mlp",
    "vision",
    "other",
)
"""Of a checkpoint's parameters, in the order reports show them; they sum to all."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a trunk weight by the dtype it is loaded in."""

# Tensors of these groups have an entry an expert, or a row an expert.
_GROWS_WITH_EXPERTS = ("routed_experts", "router")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class TensorKind(NamedTuple):
    """Tensors of one name: ``copies`` of the spec's shape; ``layer`` is None outside the layers."""

    name: str
    layer: int | None
    spec: TensorSpec
    copies: int


def tensor_kinds(architecture: Architecture) -> Iterator[TensorKind]:
    """A base's text tensors, each expert's counted under the first one's name.

    The full table has half a million rows; this one a few thousand.
    """
    for name, spec in text_tensors(replace(architecture, num_experts=1)).items():
        grows = spec.group in _GROWS_WITH_EXPERTS
        yield TensorKind(name, layer_of(name), spec, architecture.num_experts if grows else 1)


def count_parameters(architecture: Architecture, vision_config: Any = None) -> dict[str, int]:
    """Parameters by part, ``total``, and ``active`` of a token.

    A packed byte stands for two, a scale for none. ``active`` is of the text model and leaves out
    the embedding table, which is looked up.

    Args:
        architecture: of the base.
        vision_config: the published one; None, or one that tells no sizes, is no image tower.
    """
    counts: Counter[str] = Counter()
    for kind in tensor_kinds(architecture):
        counts[kind.spec.group] += kind.copies * parameter_count(kind.name, kind.spec.shape)
    parts = {part: counts.pop(part, 0) for part in PARTS if part not in ("vision", "other")}
    active = active_parameters(architecture, {**parts, **counts})
    vision = vision_tensors(vision_config)
    parts["vision"] = sum(parameter_count(name, spec.shape) for name, spec in vision.items())
    # the router, the norms and the mixers of the residual bank
    parts["other"] = sum(counts.values())
    return {**parts, "total": sum(parts.values()), "active": active}


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of a loaded base.

    Attributes:
        experts: all routed experts of all layers, packed.
        weights: of each decoder layer, sizes of the trunk's tensors: all but the routed experts.
        embedding, head: the two tables.
        outside: the trunk's other tensors outside the layers.
    """

    experts: int
    weights: tuple[tuple[int, ...], ...]
    embedding: int
    head: int
    outside: int

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The trunk's bytes of each decoder layer."""
        return tuple(map(sum, self.weights))

    @property
    def trunk(self) -> int:
        """All but the routed experts."""
        return sum(self.layers) + self.embedding + self.head + self.outside


def base_bytes(architecture: Architecture, dtype: str = "bfloat16") -> BaseBytes:
    """What the base's tensors take once loaded; the image tower is not.

    Args:
        architecture: of the base.
        dtype: the trunk's, of :data:`DTYPE_BYTES`; F32 tensors stay F32, experts stay packed.
    """
    widths: Mapping[str, int] = {"U8": 1, "F32": 4, "BF16": DTYPE_BYTES[dtype]}
    experts = 0
    weights: list[list[int]] = [[] for _ in range(architecture.num_hidden_layers)]
    outside: Counter[str] = Counter()
    for name, layer, spec, copies in tensor_kinds(architecture):
        # the zero tail of A_log is not loaded
        size = copies * (spec.least_length or math.prod(spec.shape)) * widths[spec.dtype]
        if spec.group == "routed_experts":
            experts += size
        elif layer is not None:
            weights[layer].append(size)
        else:
            outside[next((end for end in (_EMBEDDING, _HEAD) if name.endswith(end)), "")] += size
    return BaseBytes(
        experts, tuple(map(tuple, weights)), outside[_EMBEDDING], outside[_HEAD], outside[""]
    )
