"""One token of every row through Kimi Delta Attention, between its projections, for decoding."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.kda_step import reference
from k3tune_kernels.kda_step.operands import KdaConstants, KdaInputs

__all__ = ["KdaConstants", "KdaInputs", "kda_step"]

# what the native kernels take a head's width to be a multiple of
_WIDTH_STEP = 16


def kda_step(
    inputs: KdaInputs,
    constants: KdaConstants,
    window_BPC: torch.Tensor,
    state_BHKV: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """The gated output of one token of each row; ``window_BPC`` and ``state_BHKV`` move on by it.

    With ``c`` the convolved inputs (SiLU of the taps' sum), q and k of unit length, q over
    ``sqrt(K)``, ``alpha = exp(bound sigmoid(rate (logit + bias)))`` and ``b = sigmoid(beta)``::

        S <- diag(alpha) S;   S <- S + b k (v - S^T k)^T;   o = S^T q
        out = o / rms(o) * norm * sigmoid(gate)

    Not differentiable.

    Args:
        inputs: bf16, fp32 or fp64, contiguous.
        constants: fp32 tensors.
        window_BPC: the P inputs of q, k and v before, ``[B, P, 3 W]`` in the inputs' dtype,
            contiguous; updated.
        state_BHKV: fp32 (fp64 with fp64 inputs), contiguous; updated.
        backend: ``auto``, ``cpu`` or ``reference``.

    Returns:
        ``[B, W]`` in the inputs' dtype.

    Raises:
        ValueError: if the backend cannot run here.
    """
    cpu_limit = None
    if state_BHKV.shape[-1] % _WIDTH_STEP:
        cpu_limit = f"its CPU kernel takes heads of a multiple of {_WIDTH_STEP} values"
    chosen = dispatch.choose("kda_step", backend, inputs.q, state_BHKV, cpu_limit=cpu_limit)
    if chosen == "cpu":
        from k3tune_kernels.kda_step.cpu_op import kda_step_cpu

        return kda_step_cpu(inputs, constants, window_BPC, state_BHKV)
    return reference.kda_step(inputs, constants, window_BPC, state_BHKV)
