"""The small ops' Triton kernels as compiled, on a GPU, at K3's widths."""

import pytest
import torch

import attention_residual_cases
import linear_cross_entropy_cases
import situ_glu_cases
from closeness import assert_close

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def on_device(*tensors):
    return [t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in tensors]


def assert_all_close(names, actual, expected, bound):
    for name, a, e in zip(names, actual, expected, strict=True):
        assert_close(name, a.cpu(), e, max_rel=4 * bound, rms_rel=bound)


def assert_bit_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@dtypes
def test_situ_glu_equals_fp64(dtype):
    case = situ_glu_cases.inputs((63, 6144), dtype=dtype)
    actual = situ_glu_cases.run(*on_device(*case), "triton")
    assert_all_close(
        situ_glu_cases.NAMES, actual, situ_glu_cases.exact(*case), min(DTYPES[dtype], 2e-3)
    )
    assert_bit_equal(actual, situ_glu_cases.run(*on_device(*case), "triton"))


@pytest.mark.parametrize("gate_sign", [1, -1])
@pytest.mark.parametrize("up_sign", [1, -1])
def test_saturated_situ_glu_is_within_1e_6_of_fp64(gate_sign, up_sign):
    case = situ_glu_cases.saturated(gate_sign, up_sign)
    actual = situ_glu_cases.run(*on_device(*case), "triton")
    for name, a, e in zip(situ_glu_cases.NAMES, actual, situ_glu_cases.exact(*case), strict=True):
        assert_close(name, a.cpu(), e, max_rel=1e-6, rms_rel=1e-6)


@dtypes
@pytest.mark.parametrize("num_sources", [2, 9])
def test_attention_residual_equals_fp64(num_sources, dtype):
    # more tokens than programs of the backward pass
    leaves, grad = attention_residual_cases.inputs(num_sources, (1000, 7168), dtype=dtype)
    actual = attention_residual_cases.run(on_device(*leaves), *on_device(grad), "triton")
    expected = attention_residual_cases.exact(leaves, grad)
    assert_all_close(attention_residual_cases.names(num_sources), actual, expected, DTYPES[dtype])
    again = attention_residual_cases.run(on_device(*leaves), *on_device(grad), "triton")
    assert_bit_equal(actual, again)


def test_linear_cross_entropy_equals_fp64():
    case = linear_cross_entropy_cases.inputs(100, 64, 163_840)
    settings = {"chunk_tokens": 64, "backend": "triton"}
    actual = linear_cross_entropy_cases.run(*on_device(*case), **settings)
    expected = linear_cross_entropy_cases.exact(*case)
    assert_all_close(linear_cross_entropy_cases.NAMES, actual, expected, 1e-5)
    again = linear_cross_entropy_cases.run(*on_device(*case), **settings)
    assert_bit_equal(actual, again)
