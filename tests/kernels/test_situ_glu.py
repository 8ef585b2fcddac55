"""SiTU-GLU: the equation, its gradients, and both where the activation is saturated."""

import pytest
import torch

from closeness import assert_close
from k3tune_kernels.situ_glu import situ_glu
from situ_glu_cases import BOUNDS, NAMES, exact, inputs, run, saturated


def test_situ_glu_equals_the_equation_in_fp64():
    gate, up, grad = inputs((5, 63), dtype=torch.float64)
    for name, actual, expected in zip(
        NAMES, run(gate, up, grad), exact(gate, up, grad), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-14, rms_rel=1e-14)


def test_gradients_pass_gradcheck():
    gate, up, _ = inputs((3, 7), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, **BOUNDS), (gate, up))


def test_fp32_value_and_gradients_are_within_1e_6_of_fp64():
    gate, up, grad = inputs((100, 63))
    for name, actual, expected in zip(
        NAMES, run(gate, up, grad), exact(gate, up, grad), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-6, rms_rel=1e-6)


@pytest.mark.parametrize("gate_sign", [1, -1])
@pytest.mark.parametrize("up_sign", [1, -1])
def test_saturated_values_and_gradients_are_finite_and_within_1e_6(gate_sign, up_sign):
    case = saturated(gate_sign, up_sign)
    for name, actual, expected in zip(NAMES, run(*case), exact(*case), strict=True):
        assert_close(name, actual, expected, max_rel=1e-6, rms_rel=1e-6)


def test_infinite_inputs_give_the_limits():
    infinity = float("inf")
    gate = torch.tensor([infinity, -infinity, infinity], requires_grad=True)
    up = torch.tensor([infinity, infinity, -infinity], requires_grad=True)
    out, d_gate, d_up = run(gate, up, torch.ones(3))
    assert out.tolist() == [100, 0, -100]
    assert d_gate.tolist() == d_up.tolist() == [0, 0, 0]


def test_bf16_is_computed_in_fp32_and_rounded_once():
    gate, up, grad = inputs((64, 100), dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in (gate, up)]
    for actual, expected in zip(run(gate, up, grad), run(*wide, grad.float()), strict=True):
        assert torch.equal(actual, expected.bfloat16())


def test_autocast_changes_nothing():
    gate, up, _ = inputs((4, 16))
    plain = situ_glu(gate, up, **BOUNDS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(situ_glu(gate, up, **BOUNDS), plain)


def test_only_the_two_inputs_are_kept_for_backward():
    gate, up, _ = inputs((4, 16), dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        situ_glu(gate, up, **BOUNDS)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


def test_an_input_without_gradient_gets_none():
    gate, up, _ = inputs((4, 16))
    up = up.detach()
    situ_glu(gate, up, **BOUNDS).sum().backward()
    assert gate.grad is not None and up.grad is None


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), ()])
def test_empty_and_scalar_shapes_pass_through(shape):
    gate, up, grad = inputs(shape)
    out, d_gate, d_up = run(gate, up, grad)
    assert out.shape == d_gate.shape == d_up.shape == shape


def test_strided_inputs_equal_their_contiguous_copies():
    gate, up, grad = inputs((63, 100))
    expected = run(gate, up, grad)
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in (gate, up)]
    for name, actual, want in zip(NAMES, run(*strided, grad), expected, strict=True):
        assert_close(name, actual, want, max_rel=1e-6, rms_rel=1e-6)


def test_mismatched_inputs_are_named():
    gate, up, _ = inputs((4, 16))
    with pytest.raises(ValueError, match=r"\(4, 16\) torch.float32 and \(4, 15\)"):
        situ_glu(gate, up[:, :15], **BOUNDS)
    with pytest.raises(ValueError, match=r"torch.float32 and \(4, 16\) torch.bfloat16"):
        situ_glu(gate, up.bfloat16(), **BOUNDS)
    with pytest.raises(ValueError, match=r"beta=0.0"):
        situ_glu(gate, up, beta=0.0, linear_beta=25.0)
