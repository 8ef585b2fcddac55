"""The forms in which the loss kernel is compiled, for :mod:`k3tune_kernels.ahead_of_time`."""

from k3tune_kernels.ahead_of_time import Specialization
from k3tune_kernels.linear_cross_entropy import triton_kernels as kernels


def specializations(arch: str) -> list[Specialization]:
    """In both dtypes, with and without the gradient; the same for every architecture."""
    return [
        Specialization(
            name=f"linear_cross_entropy_fwd_kernel {dtype}{' gradient' if gradient else ''}",
            kernel=kernels._linear_cross_entropy_fwd_kernel,
            arguments={
                "logits": f"*{dtype}",
                "targets": "*i64",
                "nll": "*fp32",
                "vocabulary": "i32",
                "ignore_index": "i32",
            },
            constants={"WITH_GRADIENT": gradient, "BLOCK_V": kernels.BLOCK_V},
            options=kernels.OPTIONS,
            # -100 is no multiple of 16
            unaligned=frozenset({"ignore_index"}),
        )
        for dtype in ("bf16", "fp32")
        for gradient in (True, False)
    ]
