"""One decoder layer: two mixes of the residual bank around attention and feed-forward.

Shape letters: ``B`` batch, ``T`` tokens, ``D`` model width, ``A`` active experts a token.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from k3tune.model.cache import KDACacheLayer, MLACacheLayer
from k3tune.model.documents import Documents
from k3tune.model.kda import KimiDeltaAttention
from k3tune.model.latent_moe import LatentMoE, Routing
from k3tune.model.layers import ResidualQuery, RMSNorm, SituMLP, mix_residuals
from k3tune.model.mla import GatedMLA
from k3tune.model.rows import KDARows, MLARows
from k3tune.published.architecture import Architecture

LayerCache = KDACacheLayer | MLACacheLayer | KDARows | MLARows


class K3DecoderLayer(GradientCheckpointingLayer):
    """A layer of Block Attention Residuals (tech report, section 2.2, eq. 8 to 10).

    The running sum ``p`` of the current block starts anew every ``attn_res_block_size`` layers;
    finished sums go to the bank, and each sublayer reads a mix of bank and running sum.
    """

    def __init__(
        self,
        architecture: Architecture,
        layer: int,
        local_experts: Sequence[int] | None,
        kernels: str,
    ) -> None:
        super().__init__()
        size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.starts_block = layer % architecture.attn_res_block_size == 0
        self.kernels = kernels
        self.self_attention_res_norm = RMSNorm(size, eps, kernels)
        self.self_attention_res_proj = ResidualQuery(size)
        self.input_layernorm = RMSNorm(size, eps, kernels)
        if architecture.is_mla(layer):
            self.self_attn: nn.Module = GatedMLA(architecture, kernels)
        else:
            self.self_attn = KimiDeltaAttention(architecture, kernels)
        self.mlp_res_norm = RMSNorm(size, eps, kernels)
        self.mlp_res_proj = ResidualQuery(size)
        self.post_attention_layernorm = RMSNorm(size, eps, kernels)
        # published under two names: dense layers have an mlp, the others a block_sparse_moe
        if architecture.is_moe(layer):
            self.block_sparse_moe = LatentMoE(architecture, local_experts, kernels)
        else:
            self.mlp = SituMLP(architecture, architecture.intermediate_size, kernels)
        self.is_moe = architecture.is_moe(layer)

    def forward(
        self,
        running_BTD: Tensor,
        *bank: Tensor,
        documents: Documents,
        cache: LayerCache | None = None,
        expert_ids_BTA: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Run the layer.

        Args:
            running_BTD: running sum of the current block (the finished block's, where this layer
                starts a new one; the embedding at layer 0).
            bank: finished block sums, oldest first, each ``[B, T, D]``.
            documents: which tokens see each other.
            cache: this layer's cache, updated in place.
            expert_ids_BTA: experts to use instead of the router's choice.

        Returns:
            The new running sum ``[B, T, D]``, and the routing (None for a dense layer).
        """
        sources = (*bank, running_BTD)
        mixed = running_BTD if not bank else self._mix(sources, attention=True)
        attended = self.self_attn(self.input_layernorm(mixed), documents, cache)
        # under autocast a sublayer may answer in a narrower dtype than the residual's
        attended = attended.to(running_BTD.dtype)
        if self.starts_block:
            bank, running = sources, attended
        else:
            running = running_BTD + attended
        mixed = self._mix((*bank, running), attention=False)
        update, routing = self._feed_forward(self.post_attention_layernorm(mixed), expert_ids_BTA)
        return running + update, routing

    def _mix(self, sources: tuple[Tensor, ...], *, attention: bool) -> Tensor:
        if attention:
            norm, query = self.self_attention_res_norm, self.self_attention_res_proj
        else:
            norm, query = self.mlp_res_norm, self.mlp_res_proj
        return mix_residuals(sources, norm, query, self.kernels)

    def _feed_forward(
        self, x_BTD: Tensor, expert_ids_BTA: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        if self.is_moe:
            return self.block_sparse_moe(x_BTD, expert_ids_BTA)
        return self.mlp(x_BTD), None


def run_layers(
    layers: nn.ModuleList,
    embedded_BTD: Tensor,
    documents: Documents,
    caches: Sequence[LayerCache | None],
    expert_ids: dict[int, Tensor],
) -> tuple[tuple[Tensor, ...], dict[int, Routing]]:
    """Run all layers and keep the bank.

    Args:
        layers: the decoder.
        embedded_BTD: embedded tokens.
        documents: which tokens see each other.
        caches: one a layer, or Nones.
        expert_ids: experts to replay, by layer.

    Returns:
        The sources of the output mix (bank and running sum), and the routing by layer.
    """
    running = embedded_BTD
    bank: tuple[Tensor, ...] = ()
    routing: dict[int, Routing] = {}
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        updated, layer_routing = layer(
            running,
            *bank,
            documents=documents,
            cache=cache,
            expert_ids_BTA=expert_ids.get(index),
        )
        if layer.starts_block:
            bank = (*bank, running)
        running = updated
        if layer_routing is not None:
            routing[index] = layer_routing
    return (*bank, running), routing
