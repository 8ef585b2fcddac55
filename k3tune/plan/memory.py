"""Bytes that one rank holds, by part: weights, adapter, training state, activations, buffers."""

from collections.abc import Mapping

from k3tune.parallel.shards import ExpertShards, shard_bytes
from k3tune.parallel.trunk_bytes import part_bytes
from k3tune.plan.activations import Activations, activations
from k3tune.plan.adapter import FACTOR_BYTES, AdapterSize
from k3tune.plan.layout import Layout
from k3tune.plan.sizes import BaseBytes
from k3tune.published.architecture import GROUP_SIZE, Architecture

MEMORY_PARTS = (
    "packed_experts",
    "trunk",
    "trunk_gathered",
    "adapter",
    "gradients",
    "optimizer",
    "zero_masters",
    "gradient_buckets",
    "dispatch",
    "activations",
    "scratch",
    "logits",
)
"""Of a rank's bytes, in the order reports show them; they sum to its total.

``trunk_gathered``: layers of a sharded trunk that are whole for a while. ``zero_masters``: ZeRO's
copy of the factors it steps. ``gradient_buckets``: what gradients are averaged through.
``dispatch``: rows on their way to experts of other ranks and back. ``scratch``: decoded weights of
the experts' op. ``logits``: the chunk of them that the loss holds at a time, as far as it is more
than what the fullest layer takes afterwards.
"""

# AdamW: two moments beside each number.
_MOMENT_BYTES = 8
_SCRATCH_BYTES = 64 << 20
# DeepSpeed's reduce_bucket_size, numbers; the buffer is made whole, however small the adapter.
_ZERO_BUCKET = 500_000_000
# Layers of a sharded trunk that are whole at a time: in use, fetched ahead, still held by autograd.
_GATHERED_LAYERS = 3
# The loss works on so many tokens: of the whole vocabulary, or by TRL's fused head of a part of it.
_LOSS_TOKENS, _HEAD_TOKENS, _HEAD_VOCAB = 1024, 4096, 32768


def bytes_of_rank(
    architecture: Architecture,
    base: BaseBytes,
    adapter: AdapterSize,
    layout: Layout,
    *,
    fused: bool = True,
    imbalance: float = 1.0,
    held: Activations | None = None,
) -> dict[str, int]:
    """Estimate of what the fullest rank holds at its peak.

    Left out: the driver's own memory, communicators, and what the allocator loses.

    Args:
        architecture: of the base.
        base: its bytes, in the layout's dtype.
        adapter: what is trained.
        layout: of the run.
        fused: whether a GPU's kernels run; else a CPU's native ones.
        imbalance: rows of the busiest rank over the mean.
        held: the layout's activations, if they are known; None: counted here.

    Returns:
        Bytes by :data:`MEMORY_PARTS`, and their sum as ``total``.
    """
    shards = ExpertShards(architecture.num_experts, layout.expert_parallel_size)
    parts = {
        "packed_experts": shard_bytes(architecture, shards, shards.sizes.index(max(shards.sizes))),
        **_trunk_bytes(base, layout),
        **_training_bytes(adapter, shards, layout, fused),
    }
    if held is None:
        held = activations(architecture, layout, adapter.ranks, fused=fused)
    parts["activations"] = held.at_most(layout.activation_checkpointing)
    if layout.expert_parallel_size > 1:
        # sent, received, answered and returned rows
        rows = layout.tokens * architecture.num_experts_per_token
        row = layout.width * architecture.routed_expert_hidden_size
        parts["dispatch"] = round(4 * rows * row * imbalance)
    parts["scratch"] = _SCRATCH_BYTES if fused else 0
    # gone before the first layer's backward takes more
    later = parts["activations"] - held.at_the_loss(layout.activation_checkpointing)
    parts["logits"] = max(0, _logits(architecture, layout) - later)
    ordered = {part: parts.get(part, 0) for part in MEMORY_PARTS}
    return {**ordered, "total": sum(ordered.values())}


def _logits(architecture: Architecture, layout: Layout) -> int:
    return layout.width * max(
        min(layout.tokens, _LOSS_TOKENS) * architecture.vocab_size,
        min(layout.tokens, _HEAD_TOKENS) * min(architecture.vocab_size, _HEAD_VOCAB),
    )


def bf16_trainer_bytes(parts: Mapping[str, int]) -> int:
    """The same rank's bytes, were its experts decoded to BF16 as other trainers do.

    Args:
        parts: from :func:`bytes_of_rank`.
    """
    # 32 weights: 16 bytes and a scale packed, 64 bytes decoded
    decoded = parts["packed_experts"] // (GROUP_SIZE // 2 + 1) * 2 * GROUP_SIZE
    return parts["total"] - parts["packed_experts"] + decoded


def _trunk_bytes(base: BaseBytes, layout: Layout) -> dict[str, int]:
    if layout.trunk_ranks == 1:
        return {"trunk": base.trunk}
    ranks = layout.trunk_ranks
    parts = [part_bytes(weights, ranks) for weights in base.weights]
    # the head is read by the loss directly, and stays
    resident = sum(parts) + part_bytes([base.embedding], ranks) + base.head + base.outside
    # without recomputation autograd holds every layer from its forward to its backward
    count = _GATHERED_LAYERS if layout.activation_checkpointing else len(parts)
    runs = [sum(parts[first : first + count]) for first in range(len(parts))]
    return {"trunk": resident, "trunk_gathered": max(runs) * ranks}


def _training_bytes(
    adapter: AdapterSize, shards: ExpertShards, layout: Layout, fused: bool
) -> dict[str, int]:
    factors = adapter.of_rank(shards)
    # ZeRO spreads a factor over the ranks that have it
    part = -(-factors.experts // layout.expert_copies) - (-factors.replicated // layout.gpus)
    zero = layout.zero_stage > 0
    if zero:
        # on a CPU pages nobody touches take no memory
        buckets = _ZERO_BUCKET if fused else min(_ZERO_BUCKET, factors.total)
    else:
        buckets = factors.total if layout.gpus > 1 else 0
    return {
        "adapter": FACTOR_BYTES * factors.total,
        "gradients": FACTOR_BYTES * (part if layout.zero_stage == 2 else factors.total),
        "optimizer": _MOMENT_BYTES * (part if zero else factors.total),
        "zero_masters": FACTOR_BYTES * part if zero else 0,
        "gradient_buckets": FACTOR_BYTES * buckets,
    }
