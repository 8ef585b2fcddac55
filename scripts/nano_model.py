"""k3-nano: its config, its trainable MXFP4 experts, its initial weights, its published files.

Only the routed experts differ from the product's model while they train: fp32 masters, rounded to
MXFP4 in every forward pass. Everything else is :class:`k3tune.model.K3ForCausalLM`.

Shape letters: ``N`` tokens, ``A`` active experts a token, ``M`` = N * A routed rows, ``C`` rows of
the busiest expert, ``E`` experts, ``L`` latent width, ``F`` expert width, ``O`` / ``I`` outputs and
inputs of a matrix, ``G`` groups of 32 inputs.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from k3tune.model import K3Config, K3ForCausalLM
from k3tune.model.latent_moe import LatentMoE, Router
from k3tune.published.architecture import GROUP_SIZE, Architecture, parse_config
from k3tune.published.tensor_table import TEXT_PREFIX, text_tensors
from k3tune_kernels.mxfp4 import encode

SCALE_RULE = "ceil"
"""How training and the stored file choose a group's scale: nothing saturates."""

VOCAB_SIZE = 384

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123])\.weight_(packed|scale)")
_LAYER = re.compile(re.escape(TEXT_PREFIX) + r"model\.layers\.(\d+)\.")
_LAYERS = 6
_MLA_LAYERS = (3, 5)
_TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": 2,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 96,
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
    "linear_attn_config": {
        "full_attn_layers": [layer + 1 for layer in _MLA_LAYERS],
        "kda_layers": [layer + 1 for layer in range(_LAYERS) if layer not in _MLA_LAYERS],
        "num_heads": 6,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP_SIZE,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                    "observer": "minmax",
                    "observer_kwargs": {},
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
    },
}


def nano_config(special_ids: Mapping[str, int]) -> dict[str, Any]:
    """The published ``config.json`` of k3-nano.

    Args:
        special_ids: ``bos_token_id``, ``eos_token_id`` (the end of a message) and
            ``pad_token_id``.
    """
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **special_ids,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT_CONFIG, **special_ids},
    }


class _FakeQuant(torch.autograd.Function):
    """Round to MXFP4 and back; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, weight_EOI: Tensor) -> Tensor:
        return round_to_mxfp4(weight_EOI)

    @staticmethod
    def backward(ctx: Any, grad_EOI: Tensor) -> Tensor:
        return grad_EOI


def round_to_mxfp4(weight: Tensor) -> Tensor:
    """What ``decode(*encode(weight, scale_rule="ceil"))`` gives, several times as fast.

    Exact for finite fp32 weights whose groups have a largest magnitude of at least ``2**-100``.

    Args:
        weight: fp32 ``[..., I]``, I a multiple of 32.
    """
    groups = weight.unflatten(-1, (-1, GROUP_SIZE))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))
    exponent = exponent - 3 + (mantissa > 0.75).int()
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    scaled = groups / scale
    # steps of the E2M1 grid: 0.5 below 2, 1 below 4, 2 up to 6
    magnitude = scaled.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return ((scaled / step).round_().mul_(step).mul_(scale)).flatten(-2)


class TrainableExperts(nn.Module):
    """Stands in for :class:`RoutedExperts` during pre-training: same call, fp32 masters.

    Attributes:
        w1, w3, w2: gate and up ``[E, F, L]``, down ``[E, L, F]``.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        latent, width = architecture.routed_expert_hidden_size, architecture.moe_intermediate_size
        self.w1 = nn.Parameter(torch.zeros(architecture.num_experts, width, latent))
        self.w3 = nn.Parameter(torch.zeros(architecture.num_experts, width, latent))
        self.w2 = nn.Parameter(torch.zeros(architecture.num_experts, latent, width))
        self.beta = architecture.activation_situ_beta
        self.linear_beta = architecture.activation_situ_linear_beta

    def forward(self, z_NL: Tensor, expert_ids_NA: Tensor, expert_weights_NA: Tensor) -> Tensor:
        """``sum_a weight_a * w2_a(SiTU(w1_a z, w3_a z))`` over rounded weights; ``[N, L]``."""
        w1, w3, w2 = (_FakeQuant.apply(w) for w in (self.w1, self.w3, self.w2))
        place_M, token_EC = _sorted_places(expert_ids_NA, len(w1))
        rows_ECL = z_NL.index_select(0, token_EC).view(len(w1), -1, z_NL.shape[1])
        gate_ECF, up_ECF = (rows_ECL @ torch.cat([w1, w3], dim=1).mT).chunk(2, dim=-1)
        hidden_ECF = _FastSituGlu.apply(gate_ECF, up_ECF, self.beta, self.linear_beta)
        out_ML = (hidden_ECF @ w2.mT).flatten(0, 1).index_select(0, place_M)
        return (out_ML.view(*expert_ids_NA.shape, -1) * expert_weights_NA[..., None]).sum(1)


class _FastSituGlu(torch.autograd.Function):
    """SiTU-GLU with ``tanh(x)`` as ``2 sigmoid(2x) - 1``: on a CPU tanh costs six sigmoids.

    The product's op is exact where the activation saturates; here 1e-6 is good enough.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        sigmoid = gate.sigmoid()
        tanh_gate = (gate * (2 / beta)).sigmoid_().mul_(2).sub_(1)
        tanh_up = (up * (2 / linear_beta)).sigmoid_().mul_(2).sub_(1)
        ctx.save_for_backward(sigmoid, tanh_gate, tanh_up)
        ctx.bounds = (beta, linear_beta)
        return (sigmoid * tanh_gate).mul_(tanh_up).mul_(beta * linear_beta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sigmoid, tanh_gate, tanh_up = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        slope = (1 - tanh_gate.square()).addcmul_(tanh_gate, 1 - sigmoid, value=beta)
        scaled = grad * sigmoid
        d_gate = (scaled * slope).mul_(tanh_up).mul_(linear_beta)
        d_up = scaled.mul_(tanh_gate).mul_(1 - tanh_up.square()).mul_(beta)
        return d_gate, d_up, None, None


def _sorted_places(expert_ids_NA: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Give every routed row a place among the rows of its expert.

    Returns:
        ``place_M``: the row's place in ``[E * C]``; ``token_EC``: the token in each place, 0 in
        places that stay empty (nobody reads their output, so no gradient comes from them).
    """
    expert_M = expert_ids_NA.flatten()
    counts_E = expert_M.bincount(minlength=num_experts)
    capacity = int(counts_E.max())
    order_M = expert_M.argsort(stable=True)
    starts_E = counts_E.cumsum(0) - counts_E
    sorted_M = expert_M[order_M]
    slot_M = sorted_M * capacity + torch.arange(len(order_M)) - starts_E[sorted_M]
    place_M = torch.empty_like(slot_M)
    place_M[order_M] = slot_M
    token_EC = slot_M.new_zeros(num_experts * capacity)
    token_EC[slot_M] = order_M // expert_ids_NA.shape[1]
    return place_M, token_EC


def build_model(config: Mapping[str, Any]) -> K3ForCausalLM:
    """The product's model in fp32 with trainable experts, freshly initialised.

    Draws from torch's default generator.
    """
    model = K3ForCausalLM(K3Config.from_dict(dict(config))).float()
    for module in list(model.modules()):
        if isinstance(module, LatentMoE):
            experts = TrainableExperts(model.model.architecture)
            module.experts = experts  # type: ignore[assignment]  # answers the same call
    _initialize(model)
    return model.requires_grad_(True).train()


@torch.no_grad()
def _initialize(model: K3ForCausalLM) -> None:
    """Unit variance through every matrix, ``(2L)^-1/2`` of it where the residual is written."""
    quiet = (2 * model.model.architecture.num_hidden_layers) ** -0.5
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_()
        elif isinstance(module, Router):
            module.weight.normal_(std=0.08)
        elif isinstance(module, TrainableExperts):
            for weight in (module.w1, module.w3, module.w2):
                weight.normal_(std=weight.shape[-1] ** -0.5)
    for name, parameter in model.named_parameters():
        if name.endswith((".o_proj.weight", ".down_proj.weight", ".routed_expert_up_proj.weight")):
            parameter.mul_(quiet)


def count_parameters(model: K3ForCausalLM) -> tuple[int, int]:
    """All parameters of a model with trainable experts, and those active for a token."""
    architecture = model.model.architecture
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(
        weight.numel()
        for module in model.modules()
        if isinstance(module, TrainableExperts)
        for weight in module.parameters()
    )
    idle = 1 - architecture.num_experts_per_token / architecture.num_experts
    return total, round(total - idle * experts)


@torch.no_grad()
def published_tensors(model: K3ForCausalLM, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's weights under their published names, dtypes and shapes, experts encoded."""
    own = {TEXT_PREFIX + name: value for name, value in model.state_dict().items()}
    encoded: dict[str, tuple[Tensor, Tensor]] = {}
    tensors = {}
    for name, spec in text_tensors(parse_config(config)).items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stacked = f"{expert[1]}.{expert[3]}"
            if stacked not in encoded:
                encoded[stacked] = encode(own[stacked], scale_rule=SCALE_RULE)
            value = encoded[stacked][expert[4] == "scale"][int(expert[2])]
        else:
            value = own[name].to(_DTYPES[spec.dtype])
        if spec.least_length is not None:
            value = nn.functional.pad(value, (0, spec.shape[0] - len(value)))
        assert value.shape == spec.shape, f"{name}: {value.shape=} {spec.shape=}"
        tensors[name] = value.contiguous()
    return tensors


def write_base(model: K3ForCausalLM, config: Mapping[str, Any], folder: Path) -> None:
    """Write config, weights (layer L in file L + 1, the rest in the last) and index.

    Args:
        model: with trainable experts.
        config: its published config.
        folder: existing.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "max_length": config["text_config"]["max_position_embeddings"],
        "eos_token_id": config["eos_token_id"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = published_tensors(model, config)
    last = config["text_config"]["num_hidden_layers"]
    shards: list[dict[str, Tensor]] = [{} for _ in range(last + 1)]
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        shards[int(layer[1]) if layer else last][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
