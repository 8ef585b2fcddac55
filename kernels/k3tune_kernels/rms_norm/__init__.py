"""RMSNorm over the last dimension, plain and gated."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.rms_norm import reference

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, backend: str = "auto"
) -> torch.Tensor:
    """``weight * cast(x / sqrt(mean(x^2) + eps))``: normalised in fp32, rounded, then weighted.

    Args:
        x: ``[..., D]``, bf16, fp32 or fp64.
        weight_D: ``[D]``, any floating dtype.
        eps: added to the mean square.
        backend: ``auto``, ``cpu`` or ``reference``.

    Returns:
        ``[..., D]`` in the dtype that weight and ``x`` are promoted to. Differentiable in both.

    Raises:
        ValueError: if shapes do not fit, or the backend cannot run here.
    """
    _check("rms_norm", "weight", weight_D, x.shape[-1:])
    if _choose("rms_norm", backend, x, weight_D) == "cpu":
        from k3tune_kernels.rms_norm.cpu_op import rms_norm_cpu

        return rms_norm_cpu(x, weight_D, None, eps)
    return reference.rms_norm(x, weight_D, eps)


def gated_rms_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    gate: torch.Tensor,
    *,
    eps: float,
    backend: str = "auto",
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)``, rounded once.

    Args:
        x, weight_D, eps, backend: as in :func:`rms_norm`.
        gate: ``[..., D]``, any floating dtype.

    Returns:
        ``[..., D]`` in the dtype of the gate; fp32 inside (fp64 for fp64 inputs). Differentiable
        in all three.

    Raises:
        ValueError: if shapes do not fit, or the backend cannot run here.
    """
    _check("gated_rms_norm", "weight", weight_D, x.shape[-1:])
    _check("gated_rms_norm", "gate", gate, x.shape)
    if _choose("gated_rms_norm", backend, x, weight_D, gate) == "cpu":
        from k3tune_kernels.rms_norm.cpu_op import rms_norm_cpu

        return rms_norm_cpu(x, weight_D, gate, eps)
    return reference.gated_rms_norm(x, weight_D, gate, eps)


def _check(op: str, name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if not shape or tensor.shape != shape:
        raise ValueError(
            f"{op} expects x [..., D] and a {name} of shape {tuple(shape)}, got "
            f"{tuple(tensor.shape)}"
        )


def _choose(op: str, backend: str, *tensors: torch.Tensor) -> str:
    cpu_limit = None
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        cpu_limit = f"its CPU kernel takes one dtype, found {[str(t.dtype) for t in tensors]}"
    return dispatch.choose(op, backend, *tensors, cpu_limit=cpu_limit)
