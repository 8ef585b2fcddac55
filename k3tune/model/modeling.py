"""Kimi K3's text model as a Hugging Face model, single-device and plain PyTorch.

Shape letters: ``B`` batch, ``T`` new tokens, ``D`` model width, ``V`` vocabulary, ``A`` active
experts a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from k3tune.errors import ConfigError
from k3tune.model.cache import K3Cache
from k3tune.model.configuration import K3Config
from k3tune.model.decoder import K3DecoderLayer, run_layers
from k3tune.model.documents import Documents, FrontPadding, find_documents
from k3tune.model.initialization import initialize
from k3tune.model.latent_moe import Routing
from k3tune.model.layers import ResidualQuery, RMSNorm, mix_residuals
from k3tune.model.load_report import LoadReport
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy

Replay = Mapping[int, Routing | Tensor]
"""Expert ids ``[B, T, A]`` by zero-based layer, or the routing a forward returned."""


@dataclass
class K3ModelOutput(ModelOutput):
    """Output of the backbone.

    Attributes:
        last_hidden_state: ``[B, T, D]`` after the final norm.
        cache: the :class:`~k3tune.model.cache.K3Cache` with ``use_cache``; also answers to
            ``past_key_values``.
        routing: experts and weights by zero-based layer, with ``output_routing``.
    """

    last_hidden_state: Tensor | None = None
    cache: K3Cache | None = None
    routing: dict[int, Routing] | None = None

    @property
    def past_key_values(self) -> K3Cache | None:
        """``cache``, by the name most code knows."""
        return self.cache


@dataclass
class K3CausalLMOutput(ModelOutput):
    """Output of the language model.

    Attributes:
        loss: mean next-token cross-entropy, fp32, with ``labels``.
        logits: ``[B, T, V]`` (the kept positions); None with ``labels`` unless asked for.
        cache, routing: as in :class:`K3ModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: K3Cache | None = None
    routing: dict[int, Routing] | None = None

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
        self, config: K3Config, *, experts: Sequence[int] | None = None, kernels: str = "auto"
    ) -> None:
        super().__init__(config)
        architecture = config.architecture
        self.architecture = architecture
        self.kernels = kernels
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            K3DecoderLayer(architecture, layer, experts, kernels)
            for layer in range(architecture.num_hidden_layers)
        )
        self.output_attn_res_norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.output_attn_res_proj = ResidualQuery(architecture.hidden_size)
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
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
                imply ``max_length_q`` and ``max_length_k``.
            output_routing: also return experts and weights of each layer.
            routing: run with these experts; weights are recomputed from the unbiased scores.
        """
        _refuse(**unsupported)
        hidden = self._embed(input_ids, inputs_embeds)
        shape = (hidden.shape[0], hidden.shape[1])
        cache = self._cache(_one_of("past_key_values", past_key_values, "cache", cache), use_cache)
        mask = _new_columns(attention_mask, shape, 0 if cache is None else cache.get_seq_length())
        front = None if mask is None else FrontPadding(mask)
        documents = find_documents(
            shape,
            hidden.device,
            attention_mask=mask,
            position_ids=None if position_ids is None else position_ids.expand(shape),
            cu_seq_lens=_one_of("cu_seq_lens_q", cu_seq_lens_q, "cu_seq_lens_k", cu_seq_lens_k),
            seq_idx=seq_idx,
            front=front,
            cached=None if cache is None else cache.documents,
        )
        expert_ids = self._replayed_ids(routing, shape, front)
        hidden, layer_routing = self._decode(
            hidden if front is None else front.front(hidden), documents, cache, expert_ids
        )
        if cache is not None:
            cache.documents = documents
        return K3ModelOutput(
            last_hidden_state=hidden if front is None else front.restore(hidden),
            cache=cache,
            routing=_restored(layer_routing, front) if output_routing else None,
        )

    def _cache(self, cache: K3Cache | None, use_cache: bool | None) -> K3Cache | None:
        """The cache to read and update: the given one, a new one, or none."""
        if use_cache is None:
            use_cache = self.config.get_text_config().use_cache and not self.training
        return K3Cache(self.architecture) if use_cache and cache is None else cache

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds, got both or neither")
        if inputs_embeds is None:
            assert input_ids is not None
            if input_ids.ndim != 2:
                raise ValueError(
                    f"input_ids has shape {tuple(input_ids.shape)}, expected (batch, tokens)"
                )
            inputs_embeds = self.embed_tokens(input_ids)
        return inputs_embeds

    def _decode(
        self,
        hidden_BTD: Tensor,
        documents: Documents,
        cache: K3Cache | None,
        expert_ids: dict[int, Tensor],
    ) -> tuple[Tensor, dict[int, Routing]]:
        caches = [None] * len(self.layers) if cache is None else cache.layers
        sources, routing = run_layers(self.layers, hidden_BTD, documents, caches, expert_ids)
        mixed = mix_residuals(
            sources, self.output_attn_res_norm, self.output_attn_res_proj, self.kernels
        )
        return self.norm(mixed), routing

    def _replayed_ids(
        self, routing: Replay | None, shape: tuple[int, int], front: FrontPadding | None
    ) -> dict[int, Tensor]:
        if routing is None:
            return {}
        layers = list(self.architecture.moe_layers)
        if sorted(routing) != layers:
            raise ValueError(
                f"routing names layers {sorted(routing)}, expected the MoE layers {layers}"
            )
        expected = (*shape, self.architecture.num_experts_per_token)
        replayed = {}
        for layer in layers:
            entry = routing[layer]
            ids = entry.expert_ids if isinstance(entry, Routing) else entry
            if tuple(ids.shape) != expected:
                raise ValueError(
                    f"routing of layer {layer} has shape {tuple(ids.shape)}, expected {expected} "
                    "(batch, tokens, experts a token)"
                )
            ids = ids.to(self.device, torch.int64)
            replayed[layer] = ids if front is None else front.front(ids)
        return replayed


class K3ForCausalLM(K3PreTrainedModel, GenerationMixin):
    """The language model: backbone and head.

    Args:
        config: the published config.
        experts: global ids of the routed experts this process holds, in row order; None for all.
            Tokens routed to others get nothing from them here.
        kernels: backend of every op (see ``k3tune_kernels.dispatch.BACKENDS``).

    Attributes:
        load_report: what reading the checkpoint took, once :func:`~k3tune.load_base` filled it.
    """

    load_report: LoadReport | None = None
    # transformers' Trainer then counts the targets of a whole accumulated batch
    accepts_loss_kwargs = True

    def __init__(
        self, config: K3Config, *, experts: Sequence[int] | None = None, kernels: str = "auto"
    ) -> None:
        super().__init__(config)
        self.model = K3Model(config, experts=experts, kernels=kernels)
        architecture = self.model.architecture
        self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_routing: bool = False,
        routing: Replay | None = None,
        pixel_values: Tensor | None = None,
        cache: K3Cache | None = None,
        **unsupported: Any,
    ) -> K3CausalLMOutput:
        """Run the model; arguments not named here are :meth:`K3Model.forward`'s.

        Args:
            labels: ``[B, T]`` ids, shifted inside; -100 is ignored, and so are targets at padding
                and the first token of each document. With labels ``logits`` is None unless
                ``return_logits``: the loss holds a bounded chunk of them at a time.
            logits_to_keep: so many last positions (0: all), or an int tensor of positions.
            num_items_in_batch: divisor of the summed loss; default: the number of targets.
            pixel_values: refused when set, as are ``output_attentions`` and the like.
        """
        _refuse(pixel_values=pixel_values, **unsupported)
        documents: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        documents |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        documents["seq_idx"] = seq_idx
        outputs = self.model(
            input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=False if use_cache is None and labels is not None else use_cache,
            output_routing=output_routing,
            routing=routing,
            cache=cache,
            **documents,
        )
        output = K3CausalLMOutput(cache=outputs.cache, routing=outputs.routing)
        if labels is not None:
            targets = _next_tokens(labels, **documents)
            output.loss = self._loss(outputs.last_hidden_state, targets, num_items_in_batch)
        if labels is None or return_logits:
            output.logits = self._logits(outputs.last_hidden_state, logits_to_keep)
        return output

    def token_losses(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Negative log-likelihood of each target, without ``[tokens, vocabulary]`` logits.

        Args:
            hidden_BTD: ``last_hidden_state``.
            targets_BT: the token each position predicts, -100 to leave one out.

        Returns:
            ``[B, T]`` fp32, 0 where left out.

        Raises:
            NotImplementedError: if the head is not a plain linear layer.
        """
        if not isinstance(self.lm_head, nn.Linear):
            raise NotImplementedError(
                f"lm_head is a {type(self.lm_head).__name__}, expected nn.Linear: K3 adapters do "
                "not target the head (no server takes one)"
            )
        losses = linear_cross_entropy(
            hidden_BTD.flatten(0, 1),
            self.lm_head.weight,
            targets_BT.flatten(),
            backend=self.model.kernels,
        )
        return losses.view_as(targets_BT)

    def _logits(self, hidden_BTD: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, int):
            return self.lm_head(hidden_BTD[:, -logits_to_keep:])
        return self.lm_head(hidden_BTD[:, logits_to_keep])

    def _loss(
        self, hidden_BTD: Tensor, targets_BT: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        total = self.token_losses(hidden_BTD, targets_BT).sum()
        if num_items_in_batch is None:
            return total / (targets_BT != -100).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Give ``generate`` a K3 cache (transformers would build one without the KDA states)."""
        if generation_config.cache_implementation is not None:
            raise ConfigError(
                f"cache_implementation is {generation_config.cache_implementation!r}, expected "
                "None: K3 has one kind of cache"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = K3Cache(self.model.architecture)


def _one_of(first_name: str, first: Any, second_name: str, second: Any) -> Any:
    """The value given under either of two names.

    Raises:
        ValueError: if both are given and differ.
    """
    if first is None or second is None or first is second:
        return second if first is None else first
    if isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second):
        return first
    raise ValueError(f"{first_name} and {second_name} differ: pass one of them")


def _new_columns(
    attention_mask: Tensor | None, shape: tuple[int, int], num_cached: int
) -> Tensor | None:
    """The mask of the new tokens; None when nothing is masked among tokens after a cache.

    Raises:
        ValueError: for another shape, or padding among tokens that follow a cache.
    """
    if attention_mask is None:
        return None
    batch, length = shape
    if tuple(attention_mask.shape) not in ((batch, length), (batch, num_cached + length)):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
            f"{(batch, length)} or, with the cached tokens, {(batch, num_cached + length)}: "
            "pass 1 for each token and 0 for padding"
        )
    new = attention_mask[:, -length:]
    if not num_cached:
        return new
    if bool((new == 0).any()):
        raise ValueError(
            "attention_mask masks tokens that follow cached ones: padding belongs before a row's "
            "first token (left padding)"
        )
    return None


def _refuse(
    *,
    pixel_values: Tensor | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
) -> None:
    """Refuse what PEFT and others pass by habit once it is set; Python names anything else.

    Raises:
        NotImplementedError: saying what to do instead.
    """
    if pixel_values is not None:
        raise NotImplementedError(
            "k3tune trains Kimi K3's text model only: leave pixel_values out and use text"
        )
    if output_attentions or output_hidden_states:
        raise NotImplementedError(
            "K3 keeps neither attention weights nor the layers' hidden states: leave "
            "output_attentions and output_hidden_states out, or put hooks on model.model.layers"
        )


def _next_tokens(
    labels: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor:
    """The token each position predicts, -100 for none: no target crosses documents or padding."""
    shape = (labels.shape[0], labels.shape[1])
    documents = find_documents(
        shape,
        labels.device,
        attention_mask=None if attention_mask is None else attention_mask[:, -shape[1] :],
        position_ids=None if position_ids is None else position_ids.expand(shape),
        cu_seq_lens=_one_of("cu_seq_lens_q", cu_seq_lens_q, "cu_seq_lens_k", cu_seq_lens_k),
        seq_idx=seq_idx,
    )
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    if documents.ids_BS is not None:
        ids = documents.ids_BS
        targets[:, :-1] = targets[:, :-1].masked_fill(ids[:, 1:] != ids[:, :-1], -100)
        # two padded places share a number: neither is a target
        targets = targets.masked_fill(ids < 0, -100)
    return targets


def _restored(routing: dict[int, Routing], front: FrontPadding | None) -> dict[int, Routing]:
    if front is None:
        return routing
    return {layer: Routing(*map(front.restore, entry)) for layer, entry in routing.items()}
