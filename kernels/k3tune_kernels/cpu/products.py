"""Single kernels of the library, for tests and benchmarks.

Shapes: T rows, O outputs, I inputs of one weight.
"""

import ctypes

import torch

from k3tune_kernels.cpu import library
from k3tune_kernels.mxfp4.reference import GROUP_SIZE, check_packed


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 values of MXFP4 bytes, as :func:`k3tune_kernels.mxfp4.decode` gives them."""
    check_packed("weight", packed, scale)
    packed, scale = packed.contiguous(), scale.contiguous()
    shape = (*scale.shape[:-1], scale.shape[-1] * GROUP_SIZE)
    out = torch.empty(shape, dtype=torch.bfloat16)
    groups = scale.shape[-1]
    library.load().k3_decode(
        packed.data_ptr(), scale.data_ptr(), scale[..., 0].numel(), groups, out.data_ptr()
    )
    return out


def project(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    transposed: bool = False,
    isa: str | None = None,
) -> torch.Tensor:
    """``x [T, I] @ W.T``, or with ``transposed`` ``x [T, O] @ W``; bf16 or fp32 x, fp32 result.

    Args:
        x: contiguous rows.
        packed, scale: one weight, ``[O, I/2]`` and ``[O, I/32]`` uint8; rows may be strided.
        transposed: which of the two products.
        isa: name of an instruction set; ``None`` is the best one.
    """
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    assert x.is_contiguous() and x.shape[1] == (outputs if transposed else inputs), f"{x.shape=}"
    weight = library.Weight(
        packed.data_ptr(), scale.data_ptr(), 0, packed.stride(0), 0, scale.stride(0)
    )
    out = torch.empty(x.shape[0], inputs if transposed else outputs)
    status = library.load().k3_project(
        ctypes.addressof(weight),
        outputs,
        inputs,
        x.data_ptr(),
        library.DTYPES[x.dtype],
        x.shape[0],
        transposed,
        torch.get_num_threads(),
        library.isa_index(isa),
        out.data_ptr(),
    )
    library.check(status)
    return out


def situ_glu(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    beta: float,
    linear_beta: float,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SiTU-GLU of fp32 values (a multiple of 32 of them) and its gradients in gate and up."""
    out, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    library.load().k3_situ(
        gate.data_ptr(),
        up.data_ptr(),
        grad.data_ptr(),
        gate.numel(),
        beta,
        linear_beta,
        library.isa_index(isa),
        out.data_ptr(),
        d_gate.data_ptr(),
        d_up.data_ptr(),
    )
    return out, d_gate, d_up
