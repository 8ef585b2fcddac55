"""The attention-residual mixer's Triton kernels in bf16, in the interpreter with real bf16."""

import pytest
import torch

from attention_residual_cases import exact, inputs, names, run
from closeness import assert_close


@pytest.mark.parametrize(("num_sources", "shape"), [(2, (9, 100)), (9, (5, 1000))])
def test_bf16_mix_is_within_2e_3_and_gradients_within_3e_3_of_fp64(num_sources, shape):
    case = inputs(num_sources, shape, dtype=torch.bfloat16)
    for name, actual, expected in zip(
        names(num_sources), run(*case, "triton"), exact(*case), strict=True
    ):
        bound = 2e-3 if name == "mix" else 3e-3
        assert_close(name, actual, expected, max_rel=4e-3, rms_rel=bound)


def test_bf16_equals_the_fp32_kernel_rounded_once():
    leaves, grad = inputs(3, (10, 100), dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    expected = run(wide, grad.float(), "triton")
    for actual, want in zip(run(leaves, grad, "triton"), expected, strict=True):
        assert torch.equal(actual, want.bfloat16())


def test_weights_may_be_wider_than_the_sources():
    leaves, grad = inputs(3, (8, 32), dtype=torch.bfloat16)
    leaves[-2:] = [x.detach().float().requires_grad_() for x in leaves[-2:]]
    mix, *_, d_norm, d_query = run(leaves, grad, "triton")
    assert mix.dtype == torch.bfloat16
    assert d_norm.dtype == d_query.dtype == torch.float32
