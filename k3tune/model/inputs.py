"""Checks of what callers hand to the model, each failing with a sentence.

Shape letters: ``B`` batch, ``T`` new tokens, ``S`` cached and new tokens, ``A`` active experts a
token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3tune.model.documents import PADDING, Documents
from k3tune.model.latent_moe import Routing
from k3tune.published.architecture import Architecture

Replay = Mapping[int, Routing | Tensor]
"""Expert ids ``[B, T, A]`` by zero-based layer, or the routing a forward returned."""


def one_of(first_name: str, first: Any, second_name: str, second: Any) -> Any:
    """The value given under either of two names.

    Raises:
        ValueError: if both are given and differ.
    """
    if first is None or second is None or first is second:
        return second if first is None else first
    if isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second):
        return first
    raise ValueError(f"{first_name} and {second_name} differ: pass one of them")


def refuse(
    *,
    pixel_values: Tensor | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    **unknown: Any,
) -> None:
    """Refuse what PEFT and others pass by habit once it is set, and what nobody knows.

    Raises:
        NotImplementedError: saying what to do instead.
        TypeError: for an unknown argument, as Python does.
    """
    if unknown:
        raise TypeError(f"forward() got an unexpected keyword argument {next(iter(unknown))!r}")
    if pixel_values is not None:
        raise NotImplementedError(
            "k3tune trains Kimi K3's text model only: leave pixel_values out and use text"
        )
    if output_attentions or output_hidden_states:
        raise NotImplementedError(
            "K3 keeps neither attention weights nor the layers' hidden states: leave "
            "output_attentions and output_hidden_states out, or put hooks on model.model.layers"
        )


def new_mask(
    attention_mask: Tensor | None, shape: tuple[int, int], cached: Documents | None
) -> Tensor | None:
    """The mask of the new tokens.

    Args:
        attention_mask: ``[B, T]`` or ``[B, S]``, 0 at padding.
        shape: ``(B, T)`` of the new tokens.
        cached: documents of the tokens in the cache.

    Returns:
        ``[B, T]``; None when there is no mask, or nothing masked among tokens after a cache.

    Raises:
        ValueError: for another shape, a mask that tells the cached tokens otherwise than they
            were, or padding behind a row's first token in the cache.
    """
    if attention_mask is None:
        return None
    batch, length = shape
    num_cached = 0 if cached is None else cached.num_tokens
    if tuple(attention_mask.shape) not in ((batch, length), (batch, num_cached + length)):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
            f"{(batch, length)} or, with the cached tokens, {(batch, num_cached + length)}: "
            "pass 1 for each token and 0 for padding"
        )
    new = attention_mask[:, -length:]
    if cached is None:
        return new
    held = new.new_full((batch,), num_cached)
    if cached.ids_BS is not None:
        held = (cached.ids_BS != PADDING).sum(1)
    if attention_mask.shape[1] > length:
        told = (attention_mask[:, :num_cached] != 0).sum(1)
        if bool((told != held).any()):
            raise ValueError(
                f"attention_mask counts {told.tolist()} cached tokens a row, the cache holds "
                f"{held.tolist()}: pass the mask the cache was filled with, and the new columns"
            )
    masked = new == 0
    if bool((masked & (held > 0)[:, None]).any()):
        raise ValueError(
            "attention_mask masks tokens that follow cached ones: padding belongs before a row's "
            "first token (left padding)"
        )
    return new if bool(masked.any()) else None


def replayed_ids(
    routing: Replay | None, architecture: Architecture, shape: tuple[int, int], device: torch.device
) -> dict[int, Tensor]:
    """Expert ids to replay, int64 ``[B, T, A]`` by layer.

    Raises:
        ValueError: for missing layers, another shape or dtype, or ids no router could choose.
    """
    if routing is None:
        return {}
    layers = list(architecture.moe_layers)
    if sorted(routing) != layers:
        raise ValueError(
            f"routing names layers {sorted(routing)}, expected the MoE layers {layers}"
        )
    expected = (*shape, architecture.num_experts_per_token)
    replayed = {}
    for layer in layers:
        entry = routing[layer]
        ids = entry[0] if isinstance(entry, tuple) else entry
        if tuple(ids.shape) != expected or ids.is_floating_point() or ids.is_complex():
            raise ValueError(
                f"routing of layer {layer} is {ids.dtype} of shape {tuple(ids.shape)}, expected "
                f"integers of shape {expected} (batch, tokens, experts a token)"
            )
        replayed[layer] = ids.to(device, torch.int64)
    _check_chosen(replayed, architecture.num_experts)
    return replayed


def _check_chosen(replayed: dict[int, Tensor], num_experts: int) -> None:
    for layer, ids in replayed.items():
        ordered = ids.sort(-1).values
        wrong = (ids < 0) | (ids >= num_experts)
        twice = ordered[..., 1:] == ordered[..., :-1]
        if bool(wrong.any() | twice.any()):
            raise ValueError(
                f"routing of layer {layer} holds ids from {int(ids.min())} to {int(ids.max())}, "
                f"expected different experts of 0..{num_experts - 1} for each token"
            )
