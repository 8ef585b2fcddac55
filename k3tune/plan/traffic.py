"""What crosses the links, and what decoding reads: bytes, values, messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from k3tune.parallel.shards import ExpertShards, LayerTraffic, expert_bytes, layer_traffic
from k3tune.parallel.trunk_bytes import part_bytes
from k3tune.plan.adapter import FACTOR_BYTES, RankFactors
from k3tune.plan.layout import Layout
from k3tune.plan.sizes import BaseBytes
from k3tune.published.architecture import Architecture

DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens decoded together, for which reads are shown."""


def dispatch_values(architecture: Architecture) -> int:
    """Values a token sends to its experts, one way: latents."""
    return architecture.num_experts_per_token * architecture.routed_expert_hidden_size


def conventional_dispatch_values(architecture: Architecture) -> int:
    """The same, were experts as wide as the model."""
    return architecture.num_experts_per_token * architecture.hidden_size


def distinct_experts(architecture: Architecture, tokens: int) -> float:
    """Expected experts of a layer that so many tokens reach, all sets of experts equally likely."""
    experts, active = architecture.num_experts, architecture.num_experts_per_token
    return experts * (1 - (1 - active / experts) ** tokens)


@dataclass(frozen=True)
class DecodeRead:
    """What a MoE layer reads to decode one token of each of ``batch`` sequences.

    Attributes:
        batch: sequences.
        distinct_experts: expected experts reached, under uniform routing.
        expert_bytes: of their packed weights.
        trunk_bytes: of the layer's other weights; the mean over layers, which attend in two ways.
    """

    batch: int
    distinct_experts: float
    expert_bytes: int
    trunk_bytes: int


@dataclass(frozen=True)
class ModelRead:
    """What the whole model reads to decode, beside what a uniform estimate says.

    Attributes:
        batch: sequences.
        total: bytes of experts, trunk and head, each read once.
        uniform: active parameters at the checkpoint's mean bytes a parameter, a token.
    """

    batch: int
    total: int
    uniform: int


def decode_reads(
    architecture: Architecture, base: BaseBytes, batches: Sequence[int] = DECODE_BATCHES
) -> list[DecodeRead]:
    """Reads of a MoE layer by batch."""
    moe = [base.layers[layer] for layer in architecture.moe_layers]
    trunk = round(sum(moe) / max(len(moe), 1))
    one = expert_bytes(architecture)
    distinct = [distinct_experts(architecture, batch) for batch in batches]
    return [
        DecodeRead(batch, count, round(count * one), trunk)
        for batch, count in zip(batches, distinct, strict=True)
    ]


def model_reads(
    architecture: Architecture,
    base: BaseBytes,
    reads: Sequence[DecodeRead],
    *,
    active: int,
    bytes_per_parameter: float,
) -> list[ModelRead]:
    """Reads of the whole model by batch.

    Args:
        architecture, base: of the base.
        reads: of a MoE layer.
        active: parameters a token uses.
        bytes_per_parameter: mean of the checkpoint.
    """
    # rows of the embedding table are looked up
    trunk = base.trunk - base.embedding
    layers = len(architecture.moe_layers)
    return [
        ModelRead(
            read.batch,
            trunk + layers * read.expert_bytes,
            round(read.batch * active * bytes_per_parameter),
        )
        for read in reads
    ]


@dataclass(frozen=True)
class StepTraffic:
    """What one rank sends, of one forward and backward, by kind.

    Attributes:
        layer: of one MoE layer, one forward and one backward without recomputation.
        dispatch: bytes of all MoE layers to the experts and back, recomputation included, those to
            itself too.
        dispatch_messages: to other ranks.
        trunk: bytes received to make sharded layers whole.
        trunk_messages: collectives of that.
        gradients: bytes to average the factors' gradients and to hand out the stepped factors.
    """

    layer: LayerTraffic
    dispatch: int
    dispatch_messages: int
    trunk: int
    trunk_messages: int
    gradients: int


def step_traffic(
    architecture: Architecture, base: BaseBytes, factors: RankFactors, layout: Layout
) -> StepTraffic:
    """Traffic of a rank in a step of one micro-batch, under balanced routing.

    Args:
        architecture, base: of the base.
        factors: numbers of a rank's factors.
        layout: of the run.
    """
    shards = ExpertShards(architecture.num_experts, layout.expert_parallel_size)
    layer = layer_traffic(
        shards,
        latent=architecture.routed_expert_hidden_size,
        value_bytes=layout.width,
        rows=layout.tokens * architecture.num_experts_per_token,
    )
    again = layout.activation_checkpointing
    layers = len(architecture.moe_layers) if layout.expert_parallel_size > 1 else 0
    # five exchanges of a forward and backward; counts, latents and outputs go again
    recomputed = 3 * (shards.num_ranks - 1) if again else 0
    trunk, gathers = _gathered(base, layout)
    return StepTraffic(
        layer=layer,
        dispatch=layers * (layer.total + (layer.forward if again else 0)),
        dispatch_messages=layers * (layer.messages + recomputed),
        trunk=trunk,
        trunk_messages=gathers,
        gradients=_averaged(factors, layout),
    )


def _gathered(base: BaseBytes, layout: Layout) -> tuple[int, int]:
    ranks = layout.trunk_ranks
    if ranks == 1:
        return 0, 0
    passes = 2 if layout.activation_checkpointing else 1
    # without recomputation autograd keeps what the forward gathered
    layers = passes * sum(part_bytes(weights, ranks) for weights in base.weights)
    received = (ranks - 1) * (layers + part_bytes([base.embedding], ranks))
    return received, passes * len(base.weights) + 1


def _averaged(factors: RankFactors, layout: Layout) -> int:
    """A ring's reduction and gathering: twice all but a rank's own part."""
    parts = ((factors.experts, layout.expert_copies), (factors.replicated, layout.gpus))
    return sum(2 * FACTOR_BYTES * numbers * (n - 1) // n for numbers, n in parts)
