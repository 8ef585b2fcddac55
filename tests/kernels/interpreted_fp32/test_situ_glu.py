"""SiTU-GLU's Triton kernels in fp32, in the interpreter as shipped."""

import pytest
import torch

from closeness import assert_close
from situ_glu_cases import NAMES, exact, inputs, run, saturated


@pytest.mark.parametrize("shape", [(63, 100), (1000,), (2, 3, 5), (1,)])
def test_situ_glu_is_within_1e_6_of_fp64(shape):
    case = inputs(shape)
    for name, actual, expected in zip(
        NAMES, run(*case, backend="triton"), exact(*case), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-6, rms_rel=1e-6)


def test_tiny_values_keep_their_relative_accuracy():
    case = inputs((1000,), gate_scale=1e-3, up_scale=1e-3)
    for name, actual, expected in zip(
        NAMES, run(*case, backend="triton"), exact(*case), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-6, rms_rel=1e-6)


@pytest.mark.parametrize("gate_sign", [1, -1])
@pytest.mark.parametrize("up_sign", [1, -1])
def test_saturated_values_and_gradients_are_finite_and_within_1e_6(gate_sign, up_sign):
    case = saturated(gate_sign, up_sign)
    for name, actual, expected in zip(
        NAMES, run(*case, backend="triton"), exact(*case), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-6, rms_rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_infinity_gives_the_limits_and_nan_stays():
    infinity, nan = float("inf"), float("nan")
    gate = torch.tensor([infinity, -infinity, infinity, nan, 1], requires_grad=True)
    up = torch.tensor([infinity, infinity, -infinity, 1, nan], requires_grad=True)
    out, d_gate, d_up = run(gate, up, torch.ones(5), "triton")
    assert out.tolist()[:3] == [100, 0, -100]
    assert d_gate.tolist()[:3] == d_up.tolist()[:3] == [0, 0, 0]
    for result in (out, d_gate, d_up):
        assert result[3:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), ()])
def test_empty_and_scalar_shapes_pass_through(shape):
    for result in run(*inputs(shape), "triton"):
        assert result.shape == shape and result.isfinite().all()


def test_strided_inputs_equal_their_contiguous_copies():
    case = inputs((63, 100))
    expected = run(*case, "triton")
    gate, up, grad = (x.detach().T.contiguous().T for x in case)
    strided = run(gate.requires_grad_(), up.requires_grad_(), grad, "triton")
    assert all(torch.equal(a, e) for a, e in zip(strided, expected, strict=True))


def test_repeated_runs_are_bit_equal():
    case = inputs((63, 100))
    first, second = run(*case, "triton"), run(*case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
