"""SiTU-GLU and its gradients on the native CPU kernels, for fp32 values in whole groups of 32."""

import ctypes

import torch

from k3tune_kernels.cpu import library


def forward(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta: float,
    linear_beta: float,
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """As :func:`reference.forward`; ``isa`` names an instruction set, ``None`` is the best one."""
    gate, up = gate.contiguous(), up.contiguous()
    call, out = _call(gate, up, beta, linear_beta, isa), torch.empty_like(gate)
    call.out = out.data_ptr()
    library.check(library.load().k3_situ_glu(ctypes.addressof(call)))
    return out


def backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    beta: float,
    linear_beta: float,
    *,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference.backward`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    call = _call(gate, up, beta, linear_beta, isa)
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    call.grad, call.d_gate, call.d_up = grad.data_ptr(), d_gate.data_ptr(), d_up.data_ptr()
    library.check(library.load().k3_situ_glu(ctypes.addressof(call)))
    return d_gate, d_up


def _call(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float, isa: str | None
) -> library.SituGlu:
    call = library.SituGlu()
    call.values, call.threads = gate.numel(), torch.get_num_threads()
    call.isa = library.isa_index(isa)
    call.beta, call.linear_beta = beta, linear_beta
    call.gate, call.up = gate.data_ptr(), up.data_ptr()
    return call
