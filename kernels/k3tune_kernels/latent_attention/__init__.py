"""Attention of one new token of every row over its cached latents, for decoding."""

import torch

from k3tune_kernels import dispatch

__all__ = ["latent_attention"]


def latent_attention(
    query_BHL: torch.Tensor,
    latents_BSL: torch.Tensor,
    last_place_B: torch.Tensor,
    *,
    value_width: int,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """``softmax(scale q C^T) C[:, :value_width]`` over the places up to each row's last one.

    Keys and values are the latents themselves, shared by the heads. Not differentiable.

    Args:
        query_BHL: fp32 or fp64, queries taken into the latents' space.
        latents_BSL: in the queries' dtype; the values of a place are adjacent, places beyond a
            row's last one are finite.
        last_place_B: int64, below ``S``.
        value_width: how many of a latent's values are summed.
        scale: of the scores.
        backend: ``auto``, ``cpu`` or ``reference``.

    Returns:
        ``[B, H, value_width]``.

    Raises:
        ValueError: if the backend cannot run here.
    """
    cpu_limit = None
    if latents_BSL.dtype != query_BHL.dtype or latents_BSL.stride(2) != 1:
        cpu_limit = "its CPU kernel takes adjacent latents of the queries' dtype"
    chosen = dispatch.choose(
        "latent_attention", backend, query_BHL, latents_BSL, last_place_B, cpu_limit=cpu_limit
    )
    if chosen == "cpu":
        from k3tune_kernels.latent_attention.cpu_op import latent_attention_cpu

        return latent_attention_cpu(query_BHL, latents_BSL, last_place_B, value_width, scale)
    wide_BSL = latents_BSL.to(query_BHL.dtype)
    places = torch.arange(latents_BSL.shape[1], device=latents_BSL.device)
    hidden_B1S = (places > last_place_B[:, None])[:, None]
    scores_BHS = (query_BHL * scale @ wide_BSL.transpose(1, 2)).masked_fill_(hidden_B1S, -torch.inf)
    return scores_BHS.softmax(-1) @ wide_BSL[..., :value_width]
