"""The mixer's forward on the native CPU kernels; the gradients are the reference's."""

import ctypes
from collections.abc import Sequence

import torch

from k3tune_kernels.attention_residual.reference import backward
from k3tune_kernels.cpu import library

__all__ = ["backward", "forward"]


def forward(
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    eps: float,
    *,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`reference.forward`, for bf16 and fp32; strided sources are copied first.

    Args:
        isa: name of an instruction set; ``None`` is the best one.
    """
    shape, count = sources[0].shape, len(sources)
    # held here: the call reads them by address
    sources = [source.contiguous() for source in sources]
    query_D = (norm_weight_D.detach().float() * query_weight_D.detach().float()).contiguous()
    out = torch.empty(shape, dtype=sources[0].dtype)
    weights_S, inverse_rms_S = torch.empty(2, *shape[:-1], count)
    mix = library.Mix()
    mix.tokens, mix.num_sources, mix.dim = shape[:-1].numel(), count, shape[-1]
    mix.dtype = library.DTYPES[out.dtype]
    mix.threads, mix.isa = torch.get_num_threads(), library.isa_index(isa)
    mix.eps = eps
    pointers = (ctypes.c_void_p * count)(*(source.data_ptr() for source in sources))
    mix.sources, mix.query = ctypes.addressof(pointers), query_D.data_ptr()
    mix.out, mix.weights = out.data_ptr(), weights_S.data_ptr()
    mix.inverse_rms = inverse_rms_S.data_ptr()
    library.check(library.load().k3_mix(ctypes.addressof(mix)))
    return out, weights_S, inverse_rms_S
