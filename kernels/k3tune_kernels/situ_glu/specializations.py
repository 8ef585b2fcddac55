"""The forms in which SiTU-GLU's kernels are compiled, for :mod:`k3tune_kernels.ahead_of_time`."""

from k3tune_kernels.ahead_of_time import Specialization
from k3tune_kernels.situ_glu import triton_kernels as kernels

# Arguments of each kernel that are tensors in the activations' dtype.
_TENSORS = {
    kernels._situ_glu_fwd_kernel: ("gate", "up", "out"),
    kernels._situ_glu_bwd_kernel: ("grad", "gate", "up", "d_gate", "d_up"),
}


def specializations(arch: str) -> list[Specialization]:
    """Both kernels in both dtypes, with K3's bounds; the same for every architecture."""
    return [
        Specialization(
            name=f"{kernel.__name__.strip('_')} {dtype}",
            kernel=kernel,
            arguments={name: f"*{dtype}" for name in tensors} | {"numel": "i32"},
            constants={"BETA": 4.0, "LINEAR_BETA": 25.0, "BLOCK": kernels.BLOCK},
            options=kernels.OPTIONS,
        )
        for kernel, tensors in _TENSORS.items()
        for dtype in ("bf16", "fp32")
    ]
