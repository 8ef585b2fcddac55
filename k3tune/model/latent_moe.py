"""Stable LatentMoE: router on the full width, packed experts in the latent, shared experts.

Shape letters: ``B`` batch, ``T`` tokens, ``N`` = B * T flattened tokens, ``D`` model width, ``L``
latent width, ``F`` expert width, ``E`` experts, ``A`` active experts a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3tune.model.layers import KeepsDtype, RMSNorm, SituMLP, widen, without_autocast
from k3tune.published.architecture import GROUP_SIZE, Architecture
from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora


class Routing(NamedTuple):
    """Experts of every token in one layer: global ids ``[B, T, A]`` int64, weights fp32."""

    expert_ids: Tensor
    expert_weights: Tensor


class Router(KeepsDtype):
    """Sigmoid router: chosen by the biased score, weighted by the unbiased one, in fp32."""

    kept_parameters = ("e_score_correction_bias",)

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.num_experts_per_token = architecture.num_experts_per_token
        self.routed_scaling_factor = architecture.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(architecture.num_experts, architecture.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(architecture.num_experts, dtype=torch.float32)
        )

    def forward(self, x_BTD: Tensor, expert_ids_BTA: Tensor | None = None) -> Routing:
        """Choose experts, or weigh the given ones.

        Args:
            x_BTD: tokens.
            expert_ids_BTA: experts to use instead of the router's choice.
        """
        with without_autocast(x_BTD):
            scores = F.linear(widen(x_BTD), widen(self.weight)).sigmoid()
        if expert_ids_BTA is None:
            biased = scores.detach() + self.e_score_correction_bias
            expert_ids_BTA = biased.topk(self.num_experts_per_token, dim=-1).indices
        weights = scores.gather(-1, expert_ids_BTA)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor
        return Routing(expert_ids_BTA, weights)


class PackedProjection(KeepsDtype):
    """One projection of all local experts, frozen MXFP4: ``packed`` and ``scale``, uint8.

    An adapter wraps this module and answers :attr:`factors`; :class:`RoutedExperts` asks, so the
    model knows nothing of adapters.
    """

    kept_parameters = ("packed", "scale")

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features, self.out_features = in_features, out_features
        rows = (num_experts, out_features)
        self.packed = _frozen_bytes(*rows, in_features // 2)
        self.scale = _frozen_bytes(*rows, in_features // GROUP_SIZE)

    @property
    def weight(self) -> PackedWeight:
        """Bytes of all local experts."""
        return PackedWeight(self.packed, self.scale)

    @property
    def factors(self) -> LoraFactors | None:
        """LoRA factors to add; the bare base has none."""
        return None

    def extra_repr(self) -> str:
        """Shape of the logical weight."""
        return f"experts={self.num_experts}, in={self.in_features}, out={self.out_features}, mxfp4"


class RoutedExperts(nn.Module):
    """All local experts of a layer under their published names: w1 gate, w3 up, w2 down.

    Attributes:
        activation_rounding: what their inputs are rounded to (see ``moe_lora``), to mirror an
            engine that computes so.
    """

    local_experts: Tensor | None
    activation_rounding: str = "none"

    def __init__(
        self, architecture: Architecture, local_experts: Sequence[int] | None, kernels: str
    ) -> None:
        super().__init__()
        latent, width = architecture.routed_expert_hidden_size, architecture.moe_intermediate_size
        count = architecture.num_experts if local_experts is None else len(local_experts)
        self.w1 = PackedProjection(count, latent, width)
        self.w3 = PackedProjection(count, latent, width)
        self.w2 = PackedProjection(count, width, latent)
        self.situ = Situ(
            architecture.activation_situ_beta, architecture.activation_situ_linear_beta
        )
        self.kernels = kernels
        # on the CPU even when the model is built on the meta device: it is data, not a weight
        ids = None if local_experts is None else torch.tensor(list(local_experts), device="cpu")
        self.register_buffer("local_experts", ids, persistent=False)

    def forward(self, z_NL: Tensor, expert_ids_NA: Tensor, expert_weights_NA: Tensor) -> Tensor:
        """``sum_a weight_a * w2_a(SiTU(w1_a z, w3_a z))`` over the local experts; ``[N, L]``."""
        factors = MoELora(gate=self.w1.factors, up=self.w3.factors, down=self.w2.factors)
        return moe_lora(
            z_NL,
            expert_ids_NA,
            expert_weights_NA,
            self.w1.weight,
            self.w3.weight,
            self.w2.weight,
            None if factors == MoELora() else factors,
            situ=self.situ,
            local_experts=self.local_experts,
            activation_rounding=self.activation_rounding,
            backend=self.kernels,
        )


class LatentMoE(nn.Module):
    """``up(norm(experts(down(x)))) + shared(x)`` (tech report, section 2.3)."""

    def __init__(
        self, architecture: Architecture, local_experts: Sequence[int] | None, kernels: str
    ) -> None:
        super().__init__()
        hidden_size, latent = architecture.hidden_size, architecture.routed_expert_hidden_size
        self.gate = Router(architecture)
        self.routed_expert_down_proj = nn.Linear(hidden_size, latent, bias=False)
        self.experts = RoutedExperts(architecture, local_experts, kernels)
        self.routed_expert_norm = RMSNorm(latent, architecture.rms_norm_eps, kernels)
        self.routed_expert_up_proj = nn.Linear(latent, hidden_size, bias=False)
        self.shared_experts = SituMLP(architecture, architecture.shared_intermediate_size, kernels)

    def forward(
        self, x_BTD: Tensor, expert_ids_BTA: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """``[B, T, D]`` to ``[B, T, D]``, and the routing used.

        Args:
            x_BTD: normed tokens.
            expert_ids_BTA: experts to use instead of the router's choice (replay).
        """
        routing = self.gate(x_BTD, expert_ids_BTA)
        latent = self.routed_expert_down_proj(x_BTD)
        mixed = self.experts(
            latent.flatten(0, 1),
            routing.expert_ids.flatten(0, 1),
            routing.expert_weights.flatten(0, 1),
        )
        routed = self.routed_expert_up_proj(self.routed_expert_norm(mixed.view_as(latent)))
        return routed + self.shared_experts(x_BTD), routing


def _frozen_bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
