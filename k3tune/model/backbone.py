"""Kimi K3's backbone as a Hugging Face model, single-device and plain PyTorch.

Shape letters: ``B`` batch, ``T`` new tokens, ``D`` model width, ``A`` active experts a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from k3tune.model.cache import K3Cache
from k3tune.model.configuration import K3Config
from k3tune.model.decoder import K3DecoderLayer, LayerCache, run_layers
from k3tune.model.documents import Documents, FrontPadding, find_documents
from k3tune.model.initialization import initialize
from k3tune.model.inputs import Replay, new_mask, one_of, refuse, replayed_ids
from k3tune.model.latent_moe import Routing
from k3tune.model.layers import ResidualQuery, RMSNorm, mix_residuals
from k3tune.model.local_experts import LayerExperts
from k3tune.model.rows import RowCache


@dataclass
class K3ModelOutput(ModelOutput):
    """Output of the backbone.

    Attributes:
        last_hidden_state: ``[B, T, D]`` after the final norm.
        cache: the :class:`~k3tune.model.cache.K3Cache` with ``use_cache``; also answers to
            ``past_key_values``.
        routing: experts and weights by zero-based layer, with ``output_routing``.
        document_ids: int64 ``[B, T]``, the document of each token, -1 at padding; None when each
            row is one document without padding.
    """

    last_hidden_state: Tensor | None = None
    cache: K3Cache | None = None
    routing: dict[int, Routing] | None = None
    document_ids: Tensor | None = None

    @property
    def past_key_values(self) -> K3Cache | None:
        """``cache``, by the name most code knows."""
        return self.cache


class K3PreTrainedModel(PreTrainedModel):
    """What transformers needs to know about K3."""

    config_class = K3Config
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["K3DecoderLayer"]  # noqa: RUF012 - transformers types it as a variable
    # a recurrent state cannot be rolled back: transformers then refuses assisted generation
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Not supported.

        Raises:
            NotImplementedError: always; the published layout has a reader of its own.
        """
        raise NotImplementedError(
            f"{cls.__name__}.from_pretrained cannot read the published Kimi K3 layout: use "
            "k3tune.load_base(path)"
        )

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config.get_text_config().initializer_range)


class K3Model(K3PreTrainedModel):
    """Embedding, decoder layers, output mix and final norm."""

    def __init__(
        self,
        config: K3Config,
        *,
        experts: Sequence[int] | LayerExperts | None = None,
        kernels: str = "auto",
    ) -> None:
        super().__init__(config)
        architecture = config.architecture
        self.architecture = architecture
        self.kernels = kernels
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            K3DecoderLayer(
                architecture,
                layer,
                experts.get(layer) if isinstance(experts, Mapping) else experts,
                kernels,
            )
            for layer in range(architecture.num_hidden_layers)
        )
        self.output_attn_res_norm = RMSNorm(
            architecture.hidden_size, architecture.rms_norm_eps, kernels
        )
        self.output_attn_res_proj = ResidualQuery(architecture.hidden_size)
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_routing: bool = False,
        routing: Replay | None = None,
        cache: K3Cache | None = None,
        **unsupported: Any,
    ) -> K3ModelOutput:
        """Run the backbone.

        Args:
            input_ids, inputs_embeds: ``[B, T]`` or ``[B, T, D]``; one of them.
            attention_mask: ``[B, T]`` or, with a cache, ``[B, cached + T]``; 0 at padding.
            position_ids: ``[B, T]``; K3 has no positions: a 0 at an unmasked place only starts a
                document.
            past_key_values, cache: the cache of earlier tokens, under either name.
            use_cache: return a cache; default: not in training.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: other descriptions of packed documents, which
                ``max_length_q`` and ``max_length_k`` bound.
            output_routing: also return experts and weights of each layer.
            routing: run with these experts; weights are recomputed from the unbiased scores.
        """
        refuse(**unsupported)
        hidden = self._embed(input_ids, inputs_embeds)
        shape = (hidden.shape[0], hidden.shape[1])
        cache = self._cache(one_of("past_key_values", past_key_values, "cache", cache), use_cache)
        cached = None if cache is None else cache.documents
        mask = new_mask(attention_mask, shape, cached)
        front = None if mask is None else FrontPadding(mask)
        documents = find_documents(
            shape,
            hidden.device,
            attention_mask=mask,
            position_ids=position_ids,
            cu_seq_lens=one_of("cu_seq_lens_q", cu_seq_lens_q, "cu_seq_lens_k", cu_seq_lens_k),
            max_length=one_of("max_length_q", max_length_q, "max_length_k", max_length_k),
            seq_idx=seq_idx,
            front=front,
            cached=cached,
        )
        replayed = replayed_ids(routing, self.architecture, shape, hidden.device)
        hidden, used = self._decode(hidden, documents, cache, replayed, front)
        if cache is not None:
            cache.documents = documents
        return K3ModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            routing=used if output_routing else None,
            document_ids=_restored(documents.new_ids_BT, front),
        )

    @torch.no_grad()
    def decode(self, input_ids_B: Tensor, rows: RowCache) -> tuple[Tensor, dict[int, Routing]]:
        """One new token of every row, each at its own position.

        Args:
            input_ids_B: the token that follows each row, in the order of the slots.
            rows: updated in place.

        Returns:
            ``[B, D]`` after the final norm, and the routing by layer (of one token a row).
        """
        rows.begin_step()
        embedded = self.embed_tokens(input_ids_B[:, None])
        hidden, routing = self._decode(embedded, Documents(None, 1), rows, {}, None)
        rows.end_step()
        return hidden[:, 0], routing

    def _cache(self, cache: K3Cache | None, use_cache: bool | None) -> K3Cache | None:
        """The cache to read and update: the given one, a new one, or none."""
        if use_cache is None:
            wanted = self.config.use_cache and self.config.get_text_config().use_cache
            use_cache = wanted and not self.training
        if cache is not None and not isinstance(cache, K3Cache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}, expected the K3Cache that an "
                "earlier forward returned"
            )
        replays = self.training and torch.is_grad_enabled()
        replays = replays and any(layer.gradient_checkpointing for layer in self.layers)
        if replays and (use_cache or cache is not None):
            raise ValueError(
                "activation checkpointing runs layers twice and cannot fill a cache: pass "
                "use_cache=False, or call the model in eval mode or under torch.no_grad()"
            )
        return K3Cache(self.architecture) if use_cache and cache is None else cache

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("expected either input_ids or inputs_embeds, got both or neither")
        wanted = ("batch", "tokens") if inputs_embeds is None else ("batch", "tokens", "width")
        if given.ndim != len(wanted) or not given.shape[1]:
            raise ValueError(
                f"{'input_ids' if inputs_embeds is None else 'inputs_embeds'} has shape "
                f"{tuple(given.shape)}, expected ({', '.join(wanted)}) with at least one token"
            )
        if inputs_embeds is None:
            return self.embed_tokens(input_ids)
        weight = self.embed_tokens.weight
        if inputs_embeds.dtype != weight.dtype or inputs_embeds.shape[2] != weight.shape[1]:
            raise ValueError(
                f"inputs_embeds is {inputs_embeds.dtype} of width {inputs_embeds.shape[2]}, "
                f"expected {weight.dtype} of width {weight.shape[1]} as the model: cast it"
            )
        return inputs_embeds

    def _decode(
        self,
        hidden_BTD: Tensor,
        documents: Documents,
        cache: K3Cache | RowCache | None,
        expert_ids: dict[int, Tensor],
        front: FrontPadding | None,
    ) -> tuple[Tensor, dict[int, Routing]]:
        """Layers, output mix and final norm, with padding moved to the front and back again."""
        if front is not None:
            hidden_BTD = front.front(hidden_BTD)
            expert_ids = {layer: front.front(ids) for layer, ids in expert_ids.items()}
        caches: Sequence[LayerCache | None] = [None] * len(self.layers)
        if cache is not None:
            caches = cache.layers
        sources, routing = run_layers(self.layers, hidden_BTD, documents, caches, expert_ids)
        mixed = mix_residuals(
            sources, self.output_attn_res_norm, self.output_attn_res_proj, self.kernels
        )
        hidden_BTD = self.norm(mixed)
        if front is not None:
            hidden_BTD = front.restore(hidden_BTD)
            routing = {layer: Routing(*map(front.restore, used)) for layer, used in routing.items()}
        return hidden_BTD, routing


def _restored(ids_BT: Tensor | None, front: FrontPadding | None) -> Tensor | None:
    return ids_BT if ids_BT is None or front is None else front.restore(ids_BT)
