"""The tensors a published K3 checkpoint must hold: name, dtype, shape and group of each.

Standard library only. Names and shapes follow the files as Moonshot publishes them; the model's
own names differ only for the routed experts (``checkpoint.py``).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from k3tune.published.architecture import GROUP_SIZE, Architecture

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")

GROUPS = (
    "routed_experts",
    "latent_projections",
    "shared_experts",
    "router",
    "attention",
    "dense_mlp",
    "norms_and_residual_mixers",
    "embedding_and_head",
    "vision",
)
"""Every tensor belongs to one of these, in the order reports show them."""


class TensorSpec(NamedTuple):
    """What a stored tensor must be.

    ``least_length`` is set for ``A_log`` alone: the file may hold more entries than heads, so any
    length from there on is right, and ``shape`` is only the length assumed without a file.
    """

    dtype: str
    shape: tuple[int, ...]
    group: str
    least_length: int | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a file may store the tensor in ``shape``."""
        if self.least_length is None:
            return shape == self.shape
        return len(shape) == 1 and shape[0] >= self.least_length

    def describe(self) -> str:
        """The expected dtype and shape, for messages."""
        if self.least_length is None:
            return f"{self.dtype} {list(self.shape)}"
        return f"{self.dtype} [{self.least_length} or more]"


def is_vision(name: str) -> bool:
    """Whether ``name`` belongs to the image tower or its projector."""
    return name.startswith(VISION_PREFIXES)


def parameter_count(name: str, shape: tuple[int, ...]) -> int:
    """Weights a stored tensor stands for: two a packed byte, none for a scale."""
    if name.endswith("weight_scale"):
        return 0
    return math.prod(shape) * (2 if name.endswith("weight_packed") else 1)


def active_parameters(architecture: Architecture, counts: Mapping[str, int]) -> int:
    """Parameters a token is multiplied with: the embedding table is looked up, most experts idle.

    Args:
        architecture: of the base.
        counts: parameters of the text model by group of :data:`GROUPS`.
    """
    a = architecture
    routed = counts["routed_experts"]
    idle = routed - routed * a.num_experts_per_token // a.num_experts
    return sum(counts.values()) - idle - a.vocab_size * a.hidden_size


def text_tensors(architecture: Architecture) -> dict[str, TensorSpec]:
    """Return every text tensor of a checkpoint with this architecture, by published name."""
    a = architecture
    mixers = dict(_mixers(a))
    kda, mla = dict(_kda(a)), dict(_mla(a))
    dense, moe = dict(_dense(a)), dict(_moe(a))
    table: dict[str, TensorSpec] = {}
    for layer in range(a.num_hidden_layers):
        prefix = f"{TEXT_PREFIX}model.layers.{layer}."
        attention = mla if a.is_mla(layer) else kda
        ffn = moe if a.is_moe(layer) else dense
        for part in (attention, mixers, ffn):
            table.update((prefix + suffix, spec) for suffix, spec in part.items())
    table.update((TEXT_PREFIX + name, spec) for name, spec in _globals(a))
    return table


def _bf16(*shape: int, group: str) -> TensorSpec:
    return TensorSpec("BF16", shape, group)


def _f32(*shape: int, group: str) -> TensorSpec:
    return TensorSpec("F32", shape, group)


def _globals(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    table, mixer = "embedding_and_head", "norms_and_residual_mixers"
    yield "model.embed_tokens.weight", _bf16(a.vocab_size, a.hidden_size, group=table)
    yield "lm_head.weight", _bf16(a.vocab_size, a.hidden_size, group=table)
    yield "model.norm.weight", _bf16(a.hidden_size, group=mixer)
    yield "model.output_attn_res_norm.weight", _bf16(a.hidden_size, group=mixer)
    yield "model.output_attn_res_proj.weight", _bf16(1, a.hidden_size, group=mixer)


def _mixers(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    group = "norms_and_residual_mixers"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", _bf16(a.hidden_size, group=group)
    for name in ("self_attention_res", "mlp_res"):
        yield f"{name}_norm.weight", _bf16(a.hidden_size, group=group)
        yield f"{name}_proj.weight", _bf16(1, a.hidden_size, group=group)


def _kda(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    group, width, head = "attention", a.kda_dim, a.kda_head_dim
    for name in ("q", "k", "v"):
        yield f"self_attn.{name}_proj.weight", _bf16(width, a.hidden_size, group=group)
        yield f"self_attn.{name}_conv1d.weight", _f32(width, 1, a.kda_conv_size, group=group)
    yield "self_attn.f_a_proj.weight", _bf16(head, a.hidden_size, group=group)
    yield "self_attn.f_b_proj.weight", _bf16(width, head, group=group)
    yield "self_attn.dt_bias", _f32(width, group=group)
    # published 128 long for 96 heads; no file can be shorter than the heads it describes
    length = max(head, a.kda_num_heads)
    yield "self_attn.A_log", TensorSpec("F32", (length,), group, least_length=a.kda_num_heads)
    yield "self_attn.b_proj.weight", _bf16(a.kda_num_heads, a.hidden_size, group=group)
    yield "self_attn.g_proj.weight", _bf16(width, a.hidden_size, group=group)
    yield "self_attn.o_norm.weight", _f32(head, group=group)
    yield "self_attn.o_proj.weight", _bf16(a.hidden_size, width, group=group)


def _mla(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    heads = a.num_attention_heads
    shapes = {
        "q_a_proj": (a.q_lora_rank, a.hidden_size),
        "q_a_layernorm": (a.q_lora_rank,),
        "q_b_proj": (heads * a.qk_head_dim, a.q_lora_rank),
        "kv_a_proj_with_mqa": (a.kv_lora_rank + a.qk_rope_head_dim, a.hidden_size),
        "kv_a_layernorm": (a.kv_lora_rank,),
        "kv_b_proj": (heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
        "g_proj": (heads * a.v_head_dim, a.hidden_size),
        "o_proj": (a.hidden_size, heads * a.v_head_dim),
    }
    for name, shape in shapes.items():
        yield f"self_attn.{name}.weight", _bf16(*shape, group="attention")


def _gated_mlp(prefix: str, outer: int, inner: int, group: str) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}.gate_proj.weight", _bf16(inner, outer, group=group)
    yield f"{prefix}.up_proj.weight", _bf16(inner, outer, group=group)
    yield f"{prefix}.down_proj.weight", _bf16(outer, inner, group=group)


def _dense(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    yield from _gated_mlp("mlp", a.hidden_size, a.intermediate_size, "dense_mlp")


def _moe(a: Architecture) -> Iterator[tuple[str, TensorSpec]]:
    moe, latent = "block_sparse_moe", a.routed_expert_hidden_size
    yield f"{moe}.gate.weight", _bf16(a.num_experts, a.hidden_size, group="router")
    yield f"{moe}.gate.e_score_correction_bias", _f32(a.num_experts, group="router")
    projections = "latent_projections"
    yield (
        f"{moe}.routed_expert_down_proj.weight",
        _bf16(latent, a.hidden_size, group=projections),
    )
    yield f"{moe}.routed_expert_up_proj.weight", _bf16(a.hidden_size, latent, group=projections)
    yield f"{moe}.routed_expert_norm.weight", _bf16(latent, group="norms_and_residual_mixers")
    yield from _gated_mlp(
        f"{moe}.shared_experts", a.hidden_size, a.shared_intermediate_size, "shared_experts"
    )
    sizes = {
        "w1": (a.moe_intermediate_size, latent),
        "w3": (a.moe_intermediate_size, latent),
        "w2": (latent, a.moe_intermediate_size),
    }
    # one pair of specs a projection, shared by all experts: the full table has half a million rows
    specs = [
        (f"{projection}.weight_{part}", TensorSpec("U8", (rows, columns // weights), group))
        for projection, (rows, columns) in sizes.items()
        for part, weights, group in (
            ("packed", 2, "routed_experts"),
            ("scale", GROUP_SIZE, "routed_experts"),
        )
    ]
    for expert in range(a.num_experts):
        for suffix, spec in specs:
            yield f"{moe}.experts.{expert}.{suffix}", spec


def vision_tensors(vision_config: Any) -> dict[str, TensorSpec]:
    """Return the image tower's tensors, or nothing if ``vision_config`` does not tell their shapes.

    The text model never reads them; they are listed so that a report on config and index alone
    can count them.
    """
    sizes = _vision_sizes(vision_config)
    if sizes is None:
        return {}
    width, inner, qkv = sizes["vt_hidden_size"], sizes["vt_intermediate_size"], sizes["qkv"]
    patch, merged, text = sizes["patch_size"], sizes["merged"], sizes["text_hidden_size"]
    tower = "vision_tower."
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}patch_embed.proj.weight": (width, 3, patch, patch),
        f"{tower}patch_embed.pos_emb.weight": (sizes["height"], sizes["width"], width),
    }
    for block in range(sizes["vt_num_hidden_layers"]):
        prefix = f"{tower}encoder.blocks.{block}."
        shapes |= {
            f"{prefix}norm0.weight": (width,),
            f"{prefix}norm1.weight": (width,),
            f"{prefix}wqkv.weight": (3 * qkv, width),
            f"{prefix}wo.weight": (width, qkv),
            f"{prefix}mlp.fc0.weight": (inner, width),
            f"{prefix}mlp.fc1.weight": (width, inner),
        }
    shapes |= {
        f"{tower}encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (text, merged),
        "mm_projector.post_norm.weight": (text,),
    }
    return {name: _bf16(*shape, group="vision") for name, shape in shapes.items()}


def _vision_sizes(vision_config: Any) -> dict[str, int] | None:
    if not isinstance(vision_config, Mapping):
        return None
    names = {
        "vt_hidden_size": "vt_hidden_size",
        "vt_intermediate_size": "vt_intermediate_size",
        "vt_num_hidden_layers": "vt_num_hidden_layers",
        "qkv_hidden_size": "qkv",
        "patch_size": "patch_size",
        "text_hidden_size": "text_hidden_size",
        "init_pos_emb_height": "height",
        "init_pos_emb_width": "width",
        "mm_hidden_size": "merged",
    }
    sizes: dict[str, Any] = {short: vision_config.get(name) for name, short in names.items()}
    merged = vision_config.get("merge_kernel_size")
    kernel = merged if isinstance(merged, list) else [merged]
    if not all(type(size) is int and size >= 0 for size in (*sizes.values(), *kernel)):
        return None
    return sizes | {"merged": sizes["merged"] * math.prod(kernel)}
