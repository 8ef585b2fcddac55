"""The mixer and its gradients on the native CPU kernels, for bf16 and fp32."""

import ctypes
from collections.abc import Sequence

import torch

from k3tune_kernels.cpu import library


def forward(
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    eps: float,
    *,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`reference.forward`; strided sources are copied first.

    Args:
        isa: name of an instruction set; ``None`` is the best one.
    """
    shape, count = sources[0].shape, len(sources)
    # held here: the call reads them by address
    sources, q_D = _contiguous(sources), _query(norm_weight_D, query_weight_D)
    out = torch.empty(shape, dtype=sources[0].dtype)
    weights_S, inverse_rms_S = torch.empty(2, *shape[:-1], count)
    pointers = _addresses(sources)
    mix = _call(sources, q_D, weights_S, inverse_rms_S, isa)
    mix.sources, mix.out, mix.eps = ctypes.addressof(pointers), out.data_ptr(), eps
    library.check(library.load().k3_mix(ctypes.addressof(mix)))
    return out, weights_S, inverse_rms_S


def backward(
    grad: torch.Tensor,
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    weights_S: torch.Tensor,
    inverse_rms_S: torch.Tensor,
    *,
    sum_weights: bool,
    isa: str | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As :func:`reference.backward`; strided sources are copied first."""
    grad, sources = grad.contiguous(), _contiguous(sources)
    q_D = _query(norm_weight_D, query_weight_D)
    d_sources = [torch.empty_like(source) for source in sources]
    d_q_D = torch.empty_like(q_D) if sum_weights else None
    pointers, d_pointers = _addresses(sources), _addresses(d_sources)
    mix = _call(sources, q_D, weights_S, inverse_rms_S, isa)
    mix.sources, mix.grad = ctypes.addressof(pointers), grad.data_ptr()
    mix.d_sources = ctypes.addressof(d_pointers)
    mix.d_query = None if d_q_D is None else d_q_D.data_ptr()
    library.check(library.load().k3_mix_backward(ctypes.addressof(mix)))
    return d_sources, d_q_D


def _call(
    sources: list[torch.Tensor],
    q_D: torch.Tensor,
    weights_S: torch.Tensor,
    inverse_rms_S: torch.Tensor,
    isa: str | None,
) -> library.Mix:
    shape = sources[0].shape
    mix = library.Mix()
    mix.tokens, mix.num_sources, mix.dim = shape[:-1].numel(), len(sources), shape[-1]
    mix.dtype = library.DTYPES[sources[0].dtype]
    mix.threads, mix.isa = torch.get_num_threads(), library.isa_index(isa)
    mix.query = q_D.data_ptr()
    mix.weights, mix.inverse_rms = weights_S.data_ptr(), inverse_rms_S.data_ptr()
    return mix


def _contiguous(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _query(norm_weight_D: torch.Tensor, query_weight_D: torch.Tensor) -> torch.Tensor:
    return (norm_weight_D.detach().float() * query_weight_D.detach().float()).contiguous()


def _addresses(tensors: list[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
