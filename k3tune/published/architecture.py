"""The published Kimi K3 config, checked and typed: the one place that reads its fields.

Standard library only, so that ``inspect`` and the planner answer without loading torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3tune.errors import ConfigError
from k3tune.files import shown
from k3tune.published.safetensors_files import read_json, unreadable

GROUP_SIZE = 32
"""Weights that share one MXFP4 scale."""

# Choices the released config spells out and this implementation takes as given.
_FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
# Absent from a config these mean what K3 does; every other field must be there.
_FIXED_OPTIONAL = {
    "moe_layer_freq",
    "num_expert_group",
    "topk_group",
    "topk_method",
    "use_grouped_topk",
    "tie_word_embeddings",
    "num_nextn_predict_layers",
}
_INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "attn_res_block_size",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
)
_POSITIVE_FIELDS = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "routed_scaling_factor",
)
_LINEAR_ATTENTION_FIELDS = (
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
    "gate_lower_bound",
    "full_attn_layers",
    "kda_layers",
)
_TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Six times the published vocabulary, K3's largest size. A product of three sizes is the most
# elements a tensor has, and must still be a number to torch.
_LARGEST_SIZE = 1 << 20
# Six times the published number over all layers: each has six rows in the table of tensors.
_MOST_EXPERTS = 1 << 19
# Factors outside fp32's normal numbers turn activations into 0, inf or nan.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-126, 2.0**127
_LARGEST_EPS = 0.1
# The lowest decay bound for which a 16-token sub-tile's exp(-sum g) stays inside fp32.
_LOWEST_GATE_BOUND = -5.0

_AS_PUBLISHED = "use config.json as Moonshot publishes it"


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of a K3 text model, layer numbers zero-based.

    Fields carry the names of the published ``text_config``; those of its ``linear_attn_config``
    start with ``kda_``. ``mla_layers`` are the gated-MLA layers, all others are KDA.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attn_res_block_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    first_k_dense_replace: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    mla_norm_eps: float
    routed_scaling_factor: float
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_size: int
    kda_gate_lower_bound: float
    mla_layers: frozenset[int]

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_dim(self) -> int:
        """Width of all KDA heads together."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def moe_layers(self) -> range:
        """Zero-based layers with routed experts."""
        return range(self.first_k_dense_replace, self.num_hidden_layers)

    def is_mla(self, layer: int) -> bool:
        """Whether ``layer`` attends by gated MLA; otherwise by KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` has routed experts; otherwise a dense MLP."""
        return layer in self.moe_layers


def read_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        ConfigError: if the file is missing or is no JSON object.
    """
    file = Path(path) / "config.json"
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"expected a Kimi K3 checkpoint folder with config.json, found no {file}: "
            "pass the folder that holds config.json and the safetensors files"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(unreadable(file, error)) from error
    return read_json(text, file, ConfigError)


def parse_config(config: Mapping[str, Any]) -> Architecture:
    """Check a published config (nested, or its ``text_config`` alone) and return its sizes.

    Args:
        config: the parsed ``config.json``. ``mla_norm_eps`` is not in the published file; its
            default 1e-6 is the released model's (the class default of its latent norms).

    Raises:
        ConfigError: naming every missing field, or the first field with an unusable value.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(
            f"text_config is a {type(text).__name__}, expected an object: {_AS_PUBLISHED}"
        )
    _require_fields(text)
    _check_fixed(text)
    _check_outer(config)
    _check_quantization(text.get("quantization_config", config.get("quantization_config")))
    linear = text["linear_attn_config"]
    named: dict[str, Any] = {name: _integer(name, text[name]) for name in _INTEGER_FIELDS}
    named |= {name: _positive(name, text[name]) for name in _POSITIVE_FIELDS}
    architecture = Architecture(
        **named,
        first_k_dense_replace=_integer("first_k_dense_replace", text["first_k_dense_replace"], 0),
        rms_norm_eps=_eps("rms_norm_eps", text["rms_norm_eps"]),
        mla_norm_eps=_eps("mla_norm_eps", text.get("mla_norm_eps", 1e-6)),
        kda_num_heads=_integer("linear_attn_config.num_heads", linear["num_heads"]),
        kda_head_dim=_integer("linear_attn_config.head_dim", linear["head_dim"]),
        kda_conv_size=_integer(
            "linear_attn_config.short_conv_kernel_size", linear["short_conv_kernel_size"]
        ),
        kda_gate_lower_bound=_gate_bound(linear["gate_lower_bound"]),
        mla_layers=_mla_layers(linear, named["num_hidden_layers"]),
    )
    _check_sizes(text, architecture)
    return architecture


def _require_fields(text: Mapping[str, Any]) -> None:
    required = (
        *_INTEGER_FIELDS,
        *_POSITIVE_FIELDS,
        "rms_norm_eps",
        "first_k_dense_replace",
        "linear_attn_config",
    )
    fixed = tuple(name for name in _FIXED_FIELDS if name not in _FIXED_OPTIONAL)
    missing = [name for name in (*required, *fixed) if text.get(name) is None]
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        missing += [
            f"linear_attn_config.{name}"
            for name in _LINEAR_ATTENTION_FIELDS
            if linear.get(name) is None
        ]
    elif linear is not None:
        raise ConfigError(
            f"linear_attn_config is a {type(linear).__name__}, expected an object with "
            f"{', '.join(_LINEAR_ATTENTION_FIELDS)}: {_AS_PUBLISHED}"
        )
    if missing:
        raise ConfigError(
            f"this config (model_type {shown(text.get('model_type'))}) lacks fields of Kimi K3: "
            f"{', '.join(missing)}. A kimi_linear model is not K3; use K3's own config.json"
        )


def _check_fixed(text: Mapping[str, Any]) -> None:
    for name, expected in _FIXED_FIELDS.items():
        found = text.get(name)
        if not (found is None and name in _FIXED_OPTIONAL):
            _require_equal(name, found, expected)
    _require_equal(
        "linear_attn_config.use_full_rank_gate",
        text["linear_attn_config"]["use_full_rank_gate"],
        True,
    )
    for name in _TOKEN_ID_FIELDS:
        _check_token_ids(name, text.get(name))


def _check_outer(config: Mapping[str, Any]) -> None:
    """Fields that transformers repeats, or looks for first, around ``text_config``."""
    if config.get("tie_word_embeddings") is not None:
        _require_equal("tie_word_embeddings", config["tie_word_embeddings"], False)
    for name in _TOKEN_ID_FIELDS:
        _check_token_ids(name, config.get(name))


def _require_equal(name: str, found: Any, expected: Any) -> None:
    # a JSON true equals 1 to Python
    if found != expected or isinstance(found, bool) != isinstance(expected, bool):
        raise ConfigError(
            f"config field {name} is {shown(found)}, expected {expected!r} as in Kimi K3: "
            "other variants are not implemented"
        )


def _check_token_ids(name: str, found: Any) -> None:
    for token in found if isinstance(found, list) else [found]:
        if token is not None and (type(token) is not int or abs(token) > _LARGEST_SIZE):
            raise ConfigError(
                f"config field {name} is {shown(found)}, expected a token id: {_AS_PUBLISHED}"
            )


def _check_quantization(quantization: Any) -> None:
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise ConfigError(
            f"quantization_config is a {type(quantization).__name__}, expected an object: "
            f"{_AS_PUBLISHED}"
        )
    found = quantization.get("format")
    if found != "mxfp4-pack-quantized":
        raise ConfigError(
            f"quantization_config.format is {shown(found)}, expected 'mxfp4-pack-quantized': "
            "use the checkpoint as Moonshot publishes it, not a converted copy"
        )


def _mla_layers(linear: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    full, kda = linear["full_attn_layers"], linear["kda_layers"]
    for name, layers in (("full_attn_layers", full), ("kda_layers", kda)):
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise ConfigError(
                f"linear_attn_config.{name} is {shown(layers)}, expected a list of ints: "
                f"{_AS_PUBLISHED}"
            )
    found = sorted([*full, *kda])
    if found != list(range(1, num_layers + 1)):
        raise ConfigError(
            "linear_attn_config.full_attn_layers and kda_layers must name each layer from 1 to "
            f"{num_layers} once (they are 1-based), found {shown(found)}: {_AS_PUBLISHED}"
        )
    return frozenset(layer - 1 for layer in full)


def _check_sizes(text: Mapping[str, Any], architecture: Architecture) -> None:
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(architecture, name) % GROUP_SIZE:
            raise ConfigError(
                f"config field {name} is {getattr(architecture, name)}, expected a multiple of "
                f"{GROUP_SIZE}: one MXFP4 scale covers {GROUP_SIZE} weights"
            )
    if architecture.num_experts_per_token > architecture.num_experts:
        raise ConfigError(
            f"config field num_experts_per_token is {architecture.num_experts_per_token}, expected "
            f"at most num_experts = {architecture.num_experts}: {_AS_PUBLISHED}"
        )
    experts = architecture.num_experts * len(architecture.moe_layers)
    if experts > _MOST_EXPERTS:
        raise ConfigError(
            f"config field num_experts is {architecture.num_experts}, expected at most "
            f"{_MOST_EXPERTS} experts over all layers, found {experts} over "
            f"{len(architecture.moe_layers)}: {_AS_PUBLISHED}"
        )
    heads, kv_heads = architecture.num_attention_heads, text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ConfigError(
            f"config field num_key_value_heads is {shown(kv_heads)}, expected "
            f"num_attention_heads = {heads}: K3's MLA has no grouped heads, other variants are not "
            "implemented"
        )


def _integer(name: str, value: Any, minimum: int = 1) -> int:
    if type(value) is not int or not minimum <= value <= _LARGEST_SIZE:
        raise ConfigError(
            f"config field {name} is {shown(value)}, expected an integer >= {minimum} and at most "
            f"{_LARGEST_SIZE}: {_AS_PUBLISHED}"
        )
    return value


def _in_range(value: Any, lowest: float, highest: float) -> bool:
    """Whether ``value`` is a number from ``lowest`` to ``highest``; nan is not."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest


def _positive(name: str, value: Any) -> float:
    if not _in_range(value, _SMALLEST_FACTOR, _LARGEST_FACTOR):
        raise ConfigError(
            f"config field {name} is {shown(value)}, expected a finite number > 0, in fp32's range "
            f"of normal numbers: {_AS_PUBLISHED}"
        )
    return float(value)


def _eps(name: str, value: Any) -> float:
    if not _in_range(value, 0, _LARGEST_EPS):
        raise ConfigError(
            f"config field {name} is {shown(value)}, expected a number from 0 to {_LARGEST_EPS}: "
            f"{_AS_PUBLISHED}"
        )
    return float(value)


def _gate_bound(value: Any) -> float:
    if not _in_range(value, _LOWEST_GATE_BOUND, math.nextafter(0, -1)):
        raise ConfigError(
            f"config field linear_attn_config.gate_lower_bound is {shown(value)}, expected a "
            f"number in [{_LOWEST_GATE_BOUND}, 0): below it the chunked form leaves fp32's range"
        )
    return float(value)
