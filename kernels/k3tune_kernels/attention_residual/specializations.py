"""The forms in which the mixer's kernels are compiled, for :mod:`k3tune_kernels.ahead_of_time`."""

from k3tune_kernels.ahead_of_time import Specialization
from k3tune_kernels.attention_residual import triton_kernels as kernels

# K3's widest mix (9 sources of 7168 channels) and a tiny model's.
_SIZES = ((9, 8192), (2, 64))


def _forward(dtype: str, num_sources: int, block_channels: int) -> Specialization:
    return Specialization(
        name=f"attention_residual_fwd_kernel {dtype} S{num_sources} D{block_channels}",
        kernel=kernels._attention_residual_fwd_kernel,
        arguments={
            "sources": (f"*{dtype}",) * num_sources,
            "norm_weight": f"*{dtype}",
            "query_weight": f"*{dtype}",
            "mix": f"*{dtype}",
            "weights": "*fp32",
            "inverse_rms": "*fp32",
            "eps": "fp32",
            "width": "i32",
        },
        constants={
            "NUM_SOURCES": num_sources,
            "BLOCK_S": kernels.BLOCK_S,
            "BLOCK_D": block_channels,
        },
        options=kernels.options(block_channels),
    )


def _backward(
    dtype: str, num_sources: int, block_channels: int, sum_weights: bool
) -> Specialization:
    frozen = "" if sum_weights else " frozen"
    return Specialization(
        name=f"attention_residual_bwd_kernel {dtype} S{num_sources} D{block_channels}{frozen}",
        kernel=kernels._attention_residual_bwd_kernel,
        arguments={
            "grad": f"*{dtype}",
            "sources": (f"*{dtype}",) * num_sources,
            "norm_weight": f"*{dtype}",
            "query_weight": f"*{dtype}",
            "weights": "*fp32",
            "inverse_rms": "*fp32",
            "d_sources": (f"*{dtype}",) * num_sources,
            "d_query_norm": "*fp32",
            "num_tokens": "i32",
            "width": "i32",
        },
        constants={
            "SUM_WEIGHTS": sum_weights,
            "NUM_SOURCES": num_sources,
            "BLOCK_S": kernels.BLOCK_S,
            "BLOCK_D": block_channels,
        },
        options=kernels.options(block_channels),
    )


def specializations(arch: str) -> list[Specialization]:
    """Both kernels in both dtypes and sizes, the backward with and without frozen weights.

    The same for every architecture.
    """
    forms = [(dtype, *size) for dtype in ("bf16", "fp32") for size in _SIZES]
    return [_forward(*form) for form in forms] + [
        _backward(*form, sum_weights) for form in forms for sum_weights in (True, False)
    ]
