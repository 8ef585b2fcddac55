"""RMSNorm, plain and gated, in plain torch, differentiated by autograd; ``...`` are the tokens."""

import torch


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """As :func:`k3tune_kernels.rms_norm.rms_norm`."""
    return weight_D * _normalised(x, eps).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """As :func:`k3tune_kernels.rms_norm.gated_rms_norm`."""
    return (_normalised(x, eps) * weight_D * _wide(gate).sigmoid()).to(gate.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
