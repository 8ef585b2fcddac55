"""Attention over cached latents on the native CPU kernels, fp32."""

import ctypes

import torch

from k3tune_kernels.cpu import library


def latent_attention_cpu(
    query_BHL: torch.Tensor,
    latents_BSL: torch.Tensor,
    last_place_B: torch.Tensor,
    value_width: int,
    scale: float,
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """:func:`k3tune_kernels.latent_attention.latent_attention` of fp32 tensors.

    Args:
        isa: name of an instruction set of :func:`k3tune_kernels.cpu.library.isas`; ``None`` is the
            best one.
    """
    # held here: the call reads them by address
    query_BHL, last_place_B = query_BHL.contiguous(), last_place_B.contiguous()
    rows, heads, dim = query_BHL.shape
    assert query_BHL.dtype is latents_BSL.dtype is torch.float32, f"{latents_BSL.dtype=}"
    assert last_place_B.dtype is torch.int64, f"{last_place_B.dtype=}"
    assert latents_BSL.shape[::2] == (rows, dim), f"{latents_BSL.shape=} {query_BHL.shape=}"
    assert latents_BSL.stride(2) == 1 and value_width <= dim, f"{value_width=} {dim=}"
    out_BHV = query_BHL.new_empty(rows, heads, value_width)
    call = library.LatentAttention(
        *(rows, heads, dim, value_width),
        torch.get_num_threads(),
        library.isa_index(isa),
        scale,
        query_BHL.data_ptr(),
        latents_BSL.data_ptr(),
        latents_BSL.stride(0),
        latents_BSL.stride(1),
        last_place_B.data_ptr(),
        out_BHV.data_ptr(),
    )
    library.check(library.load().k3_latent_attention(ctypes.addressof(call)))
    return out_BHV
