"""SiTU-GLU's Triton kernels in bf16, in the interpreter with real bf16."""

import pytest
import torch

from situ_glu_cases import inputs, run


@pytest.mark.parametrize("shape", [(63, 100), (1000,)])
def test_bf16_equals_the_fp32_kernel_rounded_once(shape):
    gate, up, grad = inputs(shape, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in (gate, up)]
    expected = run(*wide, grad.float(), "triton")
    for actual, want in zip(run(gate, up, grad, "triton"), expected, strict=True):
        assert torch.equal(actual, want.bfloat16())
