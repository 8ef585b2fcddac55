"""Kimi K3's text model with its head: loss, logits, generation.

Shape letters: ``B`` batch, ``T`` new tokens, ``D`` model width, ``V`` vocabulary.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from k3tune.errors import ConfigError
from k3tune.model.backbone import K3Model, K3PreTrainedModel
from k3tune.model.cache import K3Cache
from k3tune.model.configuration import K3Config
from k3tune.model.inputs import Replay, refuse
from k3tune.model.latent_moe import Routing
from k3tune.model.load_report import LoadReport
from k3tune.model.local_experts import LayerExperts
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy


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


class K3ForCausalLM(K3PreTrainedModel, GenerationMixin):
    """The language model: backbone and head.

    Args:
        config: the published config.
        experts: global ids of the routed experts this process holds, in row order, or these by
            layer; None for all. Tokens routed to others get nothing from them here.
        kernels: backend of every op (see ``k3tune_kernels.dispatch.BACKENDS``).

    Attributes:
        load_report: what reading the checkpoint took, once :func:`~k3tune.load_base` filled it.
    """

    load_report: LoadReport | None = None
    # transformers' Trainer then counts the targets of a whole accumulated batch
    accepts_loss_kwargs = True

    def __init__(
        self,
        config: K3Config,
        *,
        experts: Sequence[int] | LayerExperts | None = None,
        kernels: str = "auto",
    ) -> None:
        if not isinstance(config, K3Config):
            raise ConfigError(
                f"config is a {type(config).__name__}, expected the whole K3Config: "
                "K3Config(text_config=...) makes one"
            )
        super().__init__(config)
        self.model = K3Model(config, experts=experts, kernels=kernels)
        architecture = self.model.architecture
        self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        self.post_init()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """The older name, by which PEFT asks; transformers' own property would warn of it."""
        return bool(self.is_activation_checkpointing)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Likewise, for TRL, which turns it off and on again at every step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """The way back."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().gradient_checkpointing_disable()

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
        refuse(pixel_values=pixel_values)
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            False if use_cache is None and labels is not None else use_cache,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            seq_idx,
            output_routing,
            routing,
            cache,
            **unsupported,
        )
        output = K3CausalLMOutput(cache=outputs.cache, routing=outputs.routing)
        if labels is not None:
            targets = _next_tokens(labels, outputs.document_ids)
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
                f"an adapter wraps lm_head ({type(self.lm_head).__module__}), expected the plain "
                "linear layer: leave lm_head out of its targets, no server takes one"
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
            num_targets = int((targets_BT != -100).sum())
            if not num_targets:
                raise ValueError(
                    "labels hold no target, so there is no mean loss: every label is -100, padding "
                    "or a document's first token; leave such samples out"
                )
            return total / num_targets
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
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation is {generation_config.cache_implementation!r}, expected "
                "'dynamic' or None: K3 has one kind of cache"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = K3Cache(self.model.architecture)


def _next_tokens(labels: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """The token each position predicts, -100 for none: no target crosses documents or padding."""
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    if document_ids_BT is not None:
        crosses = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(crosses, -100)
        # two padded places share a number: neither is a target
        targets = targets.masked_fill(document_ids_BT < 0, -100)
    return targets
