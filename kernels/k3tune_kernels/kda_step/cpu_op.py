"""The KDA step on the native CPU kernels, fp32."""

import ctypes

import torch

from k3tune_kernels.cpu import library
from k3tune_kernels.kda_step.operands import KdaConstants, KdaInputs


def kda_step_cpu(
    inputs: KdaInputs,
    constants: KdaConstants,
    window_BPC: torch.Tensor,
    state_BHKV: torch.Tensor,
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """:func:`k3tune_kernels.kda_step.kda_step` of fp32 tensors.

    Args:
        isa: name of an instruction set of :func:`k3tune_kernels.cpu.library.isas`; ``None`` is the
            best one.
    """
    read = (*inputs, *constants[:4])
    assert all(t.is_contiguous() for t in (*read, window_BPC, state_BHKV)), "strided operands"
    assert all(t.dtype is torch.float32 for t in (*read, window_BPC, state_BHKV)), "not fp32"
    out_BW = torch.empty_like(inputs.q)
    step = library.KdaStep()
    step.rows, step.heads, step.head_dim = state_BHKV.shape[:3]
    step.context = window_BPC.shape[1]
    step.threads, step.isa = torch.get_num_threads(), library.isa_index(isa)
    step.gate_lower_bound, step.eps, step.unit_eps = constants[4:]
    for index, x in enumerate(inputs[:3]):
        step.x[index] = x.data_ptr()
    step.decay_logit, step.beta_logit, step.gate = (x.data_ptr() for x in inputs[3:])
    step.taps, step.decay_rate, step.decay_bias, step.norm_weight = (
        x.data_ptr() for x in constants[:4]
    )
    step.window, step.state = window_BPC.data_ptr(), state_BHKV.data_ptr()
    step.out = out_BW.data_ptr()
    library.check(library.load().k3_kda_step(ctypes.addressof(step)))
    return out_BW
