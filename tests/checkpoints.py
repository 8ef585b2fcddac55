"""Synthetic K3 checkpoints in the published layout, of any shape, with random weights.

Magnitudes keep every block active: unit-variance activations, logits of order one, router scores
spread over most of (0, 1), decays and gates away from their ends.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3tune.published.architecture import parse_config
from k3tune.published.tensor_table import TensorSpec, is_vision, text_tensors

# RMS of the sixteen E2M1 values, drawn evenly.
_E2M1_RMS = 2.926

ODD_SHAPES: dict[str, dict[str, Any]] = {
    # heads not a power of two, 7 experts, three MLA layers (the last two in a row), block 4
    "three_heads_seven_experts": {
        "num_hidden_layers": 9,
        "mla_layers": [3, 7, 8],
        "attn_res_block_size": 4,
        "num_attention_heads": 3,
        "kda_num_heads": 5,
        "num_experts": 7,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
    },
    # widths all different, a block boundary at the last layer, two dense layers
    "eleven_experts_two_shared": {
        "num_hidden_layers": 5,
        "mla_layers": [1, 2, 4],
        "attn_res_block_size": 4,
        "first_k_dense_replace": 2,
        "hidden_size": 72,
        "num_attention_heads": 6,
        "kda_num_heads": 3,
        "kda_head_dim": 12,
        "v_head_dim": 20,
        "num_experts": 11,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 32,
    },
}
"""Overrides for :func:`make_config` that break what the golden checkpoints have in common."""

_TEXT_DEFAULTS: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": 2,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
}


def make_config(**overrides: Any) -> dict[str, Any]:
    """A nested config as published, tiny unless told otherwise.

    Args:
        overrides: fields of ``text_config``, and ``mla_layers`` (zero-based), ``kda_num_heads``,
            ``kda_head_dim``, ``kda_gate_lower_bound`` for its ``linear_attn_config``.
    """
    text = deepcopy(_TEXT_DEFAULTS)
    linear = {
        "num_heads": overrides.pop("kda_num_heads", 2),
        "head_dim": overrides.pop("kda_head_dim", 16),
        "short_conv_kernel_size": overrides.pop("short_conv_kernel_size", 4),
        "use_full_rank_gate": True,
        "gate_lower_bound": overrides.pop("kda_gate_lower_bound", -5.0),
    }
    mla_layers = overrides.pop("mla_layers", None)
    text |= overrides
    layers = text["num_hidden_layers"]
    mla = {layers - 1} if mla_layers is None else set(mla_layers)
    linear["full_attn_layers"] = [layer + 1 for layer in sorted(mla)]
    linear["kda_layers"] = [layer + 1 for layer in range(layers) if layer not in mla]
    vocab = text["vocab_size"]
    special = {
        "bos_token_id": vocab - 4,
        "eos_token_id": vocab - 3,
        "pad_token_id": vocab - 1,
    }
    text |= special | {
        "num_key_value_heads": text["num_attention_heads"],
        "linear_attn_config": linear,
        "quantization_config": deepcopy(_QUANTIZATION),
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **special,
        "ignore_index": -100,
        "media_placeholder_token_id": vocab - 2,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"patch_size": 14, "vt_hidden_size": 8, "vt_num_hidden_layers": 0},
    }


def make_weights(
    config: Mapping[str, Any], *, seed: int = 0, a_log_padding: int = 5
) -> dict[str, Tensor]:
    """Random weights for every published tensor of ``config``, image-tower stubs included.

    Args:
        config: as from :func:`make_config`.
        seed: same seed, same weights.
        a_log_padding: zeros stored behind the heads of ``A_log``.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _draw(name, spec, generator, a_log_padding)
        for name, spec in text_tensors(parse_config(config)).items()
    }
    weights["mm_projector.post_norm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    weights["vision_tower.encoder.final_layernorm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    return weights


def _draw(name: str, spec: TensorSpec, generator: torch.Generator, a_log_padding: int) -> Tensor:
    shape = spec.shape
    if name.endswith(".weight_packed"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name.endswith(".weight_scale"):
        # three neighbouring exponents around the one that gives outputs of unit variance
        columns = 32 * shape[-1]
        exponent = round(-torch.tensor(_E2M1_RMS * columns**0.5).log2().item())
        steps = torch.randint(-1, 2, shape, generator=generator)
        return (steps + exponent + 127).to(torch.uint8)
    noise = torch.randn(shape, generator=generator)
    if spec.least_length is not None:
        heads = torch.rand(spec.least_length, generator=generator) - 0.5
        return torch.cat([heads, torch.zeros(a_log_padding)])
    value = _scaled(name, noise)
    return value.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32).contiguous()


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("conv1d.weight"):
        return 0.5 * noise
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if noise.ndim == 1:
        return 1.0 + 0.1 * noise
    spread = 2.0 if name.endswith(("gate.weight", "lm_head.weight")) else 1.0
    return spread * noise / noise.shape[-1] ** 0.5


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, single: bool = False
) -> Path:
    """Write config, shards (layer L in file L + 1, then globals, projector, tower) and index.

    Args:
        folder: made if missing.
        config, weights: as from :func:`make_config` and :func:`make_weights`.
        single: one ``model.safetensors`` without index instead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    eos = {"max_length": 4096, "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(eos))
    if single:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    layers = config["text_config"]["num_hidden_layers"]
    shards: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        shards.setdefault(_shard(name, layers), {})[name] = tensor
    files = {
        shard: f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        for number, shard in enumerate(sorted(shards), start=1)
    }
    for shard, tensors in shards.items():
        save_file(tensors, folder / files[shard], metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: files[_shard(name, layers)] for name in sorted(weights)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def _shard(name: str, layers: int) -> int:
    if is_vision(name):
        return layers + (1 if name.startswith("mm_projector.") else 2)
    parts = name.split(".")
    return int(parts[3]) if parts[2] == "layers" else layers


def build_checkpoint(
    folder: Path, *, seed: int = 0, a_log_padding: int = 5, single: bool = False, **overrides: Any
) -> Path:
    """Make and write a checkpoint in one go; ``overrides`` go to :func:`make_config`."""
    config = make_config(**overrides)
    weights = make_weights(config, seed=seed, a_log_padding=a_log_padding)
    return write_checkpoint(folder, config, weights, single=single)
