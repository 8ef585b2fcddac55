"""A plan as text for people: derivation, memory, traffic, decoding, time."""

from collections.abc import Iterator, Mapping, Sequence

from k3tune.parallel.shards import ExpertShards, expected_ranks_per_token
from k3tune.plan.planning import Plan
from k3tune.plan.sizes import PARTS
from k3tune.plan.traffic import conventional_dispatch_values, dispatch_values

_MEMORY_NOTES = {
    "packed_experts": "MXFP4 as published, frozen",
    "trunk": "everything else, frozen",
    "trunk_gathered": "sharded layers that are whole at a time",
    "adapter": "LoRA factors, FP32",
    "gradients": "of the factors",
    "optimizer": "AdamW's two moments",
    "zero_masters": "ZeRO's copy of the factors it steps",
    "gradient_buckets": "buffer gradients are averaged through",
    "dispatch": "rows to and from experts of other ranks",
    "activations": "",
    "scratch": "decoded weights of the experts' op",
    "logits": "of the loss, beyond the fullest layer",
}


def render_plan(plan: Plan) -> str:
    """Every section of the plan, without a trailing newline."""
    sections = (_parameters, _memory, _dispatch, _decode, _step)
    return "\n\n".join("\n".join(section(plan)) for section in sections)


def memory_lines(parts: Mapping[str, int], activations: str = "") -> list[str]:
    """A table of a rank's bytes: part, size, what it is.

    Args:
        parts: bytes by part, and ``total``; parts of 0 bytes are left out.
        activations: what to say about them.
    """
    notes = {**_MEMORY_NOTES, "activations": activations}
    rows = [(part, readable(size), notes.get(part, "")) for part, size in parts.items() if size]
    return list(_table(rows))


def readable(size: float) -> str:
    """Bytes in decimal units, three digits or more: ``90.4 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            value = size / scale
            return f"{value:,.2f} {unit}" if value < 10 else f"{value:,.1f} {unit}"
    return f"{size:g} B"


def _parameters(plan: Plan) -> Iterator[str]:
    a, counts = plan.architecture, plan.parameters
    mla = len(a.mla_layers)
    yield f"{plan.source}: {_short(counts['total'])} parameters, {_short(counts['active'])} active"
    yield (
        f"{a.num_hidden_layers} layers, {a.num_hidden_layers - mla} KDA and {mla} MLA; "
        f"{len(a.moe_layers)} MoE layers of {a.num_experts} experts, "
        f"{a.num_experts_per_token} a token"
    )
    yield ""
    yield from _table(
        [
            ("parameters", "", "derivation"),
            *((part, f"{counts[part]:,}", _derivation(plan, part)) for part in PARTS),
            ("total", f"{counts['total']:,}", ""),
            ("active", f"{counts['active']:,}", "a token's, without the looked-up embedding"),
        ],
    )


def _derivation(plan: Plan, part: str) -> str:
    a = plan.architecture
    latent, width, layers = a.routed_expert_hidden_size, a.moe_intermediate_size, len(a.moe_layers)
    return {
        "routed_experts": f"3 x {latent} x {width} = {_short(3 * latent * width)}, x "
        f"{a.num_experts} experts x {layers} layers",
        "latent_projections": f"2 x {a.hidden_size} x {latent} x {layers} layers",
        "shared_experts": f"3 x {a.hidden_size} x {a.shared_intermediate_size} x {layers} layers",
        "embedding_and_head": f"2 x {a.vocab_size} x {a.hidden_size}",
        "attention": f"{a.num_hidden_layers - len(a.mla_layers)} KDA, {len(a.mla_layers)} MLA",
        "dense_mlp": f"3 x {a.hidden_size} x {a.intermediate_size} x "
        f"{a.num_hidden_layers - layers} layers",
        "vision": "image tower and projector, not loaded",
        "other": "router, norms, residual mixers",
    }[part]


def _memory(plan: Plan) -> Iterator[str]:
    layout, hardware, parts = plan.layout, plan.hardware, plan.bytes_per_rank
    yield (
        f"{layout.gpus} x {hardware.name}: expert-parallel {layout.expert_parallel_size}, ZeRO "
        f"{layout.zero_stage}, trunk "
        + (f"over {layout.trunk_ranks} ranks" if layout.trunk_ranks > 1 else "on every rank")
        + f", {layout.micro_batch} x {layout.sequence_length:,} tokens a rank"
    )
    yield (
        f"LoRA rank {plan.lora.rank}, {plan.lora.form}, on {', '.join(plan.lora.targets)}: "
        f"{_short(plan.adapter.total)} parameters"
    )
    yield ""
    yield "bytes of a rank"
    yield from memory_lines(parts, _activation_note(plan))
    yield ""
    yield _verdict(plan)
    yield (
        f"with experts decoded to BF16: {readable(plan.bf16_trainer_bytes_per_rank)} a rank; "
        f"{_fewest(plan.bf16_smallest_fit)}"
    )
    yield "computed, not measured on a GPU; driver, communicators, fragmentation come on top"


def _activation_note(plan: Plan) -> str:
    held, again = plan.activations, plan.layout.activation_checkpointing
    other = held.all_layers if again else held.checkpointed
    return f"{readable(other)} {'without' if again else 'with'} checkpointing"


def _verdict(plan: Plan) -> str:
    total, room = plan.bytes_per_rank["total"], plan.hardware.memory_bytes
    verdict = "fits" if plan.fits else "does not fit"
    return f"{verdict}: {readable(total)} of {readable(room)}; {_fewest(plan.smallest_fit)}"


def _fewest(gpus: int | None) -> str:
    if gpus is None:
        return "no number of GPUs that was tried holds it"
    return f"fewest GPUs that hold it, split as asked: {gpus}"


def _dispatch(plan: Plan) -> Iterator[str]:
    a, layout, traffic = plan.architecture, plan.layout, plan.traffic
    values, wide = dispatch_values(a), conventional_dispatch_values(a)
    yield f"dispatch of a token, a MoE layer, one way: {values:,} values in the latent"
    yield (
        f"  ({readable(values * layout.width)}), against {wide:,} "
        f"({readable(wide * layout.width)}) were experts as wide as the model"
    )
    if layout.expert_parallel_size > 1:
        shards = ExpertShards(a.num_experts, layout.expert_parallel_size)
        ranks = expected_ranks_per_token(a.num_experts_per_token, shards)
        yield (
            f"  sent by a rank in a step, there and back, forward and backward: "
            f"{readable(traffic.dispatch)} in {traffic.dispatch_messages:,} messages"
        )
        yield (
            f"  a token's {a.num_experts_per_token} experts fall on {ranks:.1f} of "
            f"{layout.expert_parallel_size} ranks"
        )
    if traffic.trunk:
        yield (
            f"  sharded trunk: {readable(traffic.trunk)} received by a rank in a step, in "
            f"{traffic.trunk_messages} gathers"
        )
    if traffic.gradients:
        yield f"  gradients: {readable(traffic.gradients)} sent by a rank in a step"


def _decode(plan: Plan) -> Iterator[str]:
    yield "decoding, a token of each sequence: expected reads under uniform routing"
    scale, unit = (1e9, "GB") if plan.base.experts >= 1e9 else (1e6, "MB")
    sizes = [f"{what} {unit}" for what in ("their", "trunk", "model", "uniform")]
    rows = [
        (
            f"{layer.batch:,}",
            f"{layer.distinct_experts:.1f}",
            _decimals(layer.expert_bytes / scale),
            _decimals(layer.trunk_bytes / scale),
            _decimals(model.total / scale),
            _decimals(model.uniform / scale),
            f"{model.uniform / model.total:.2f}",
        )
        for layer, model in zip(plan.decode, plan.reads, strict=True)
    ]
    yield from _table([("batch", "experts", *sizes, "uniform/model"), *rows], left=0)
    yield f"  experts, their {unit} and the trunk's: of one MoE layer; model: all layers and head"
    yield (
        f"  uniform: {_short(plan.parameters['active'])} parameters a token, at the checkpoint's "
        "mean bytes a parameter"
    )
    yield "  too low for few sequences: the trunk is 16 bit; too high for many: they share weights"


def _step(plan: Plan) -> Iterator[str]:
    step, hardware = plan.step, plan.hardware
    how = "MXFP4 in the matrix units" if hardware.native_mxfp4 else "MXFP4 decoded in the kernel"
    yield (
        f"least time of a step of one micro-batch: {_seconds(step.step_s)}, "
        f"{step.tokens_per_s:,.0f} tokens/s on all ranks"
    )
    yield f"  at the device's peaks, which no kernel reaches; {how}"
    times = (
        ("routed experts", step.experts_s),
        ("trunk", step.trunk_s),
        ("dispatch", step.dispatch_s),
        ("trunk gathering, overlapped", step.gather_s),
        ("gradients", step.gradients_s),
    )
    yield from (f"  {name:28} {_seconds(seconds):>9}" for name, seconds in times if seconds)
    lost = f", which costs {_seconds(step.lost_s)}" if step.lost_s else ""
    yield f"  imbalance of ranks: {step.imbalance:.2f}{lost}"


def _table(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Rows in columns as wide as their widest entry.

    Args:
        rows: entries, the same number in each.
        left: so many columns at either end are written to the left, the others to the right.
    """
    columns = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    for row in rows:
        cells = (
            f"{cell:>{width}}" if left <= column < columns - left else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _decimals(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _short(count: float) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:,.2f} {unit}" if value < 100 else f"{value:,.1f} {unit}"
    return f"{count:g}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
