"""The attention-residual mixer's Triton kernels in fp32, in the interpreter as shipped."""

import pytest
import torch

from attention_residual_cases import EPS, exact, inputs, names, run
from closeness import assert_close
from k3tune_kernels.attention_residual import attention_residual, triton_kernels


def assert_all_close(results, expected, num_sources):
    """The mix to 1e-6. A gradient is a difference of larger terms: 2e-6."""
    for name, actual, want in zip(names(num_sources), results, expected, strict=True):
        bound = 1e-6 if name == "mix" else 2e-6
        assert_close(name, actual, want, max_rel=bound, rms_rel=bound)


@pytest.mark.parametrize(
    ("num_sources", "shape"),
    [(2, (63,)), (2, (2, 3, 63)), (3, (9, 100)), (9, (5, 1000)), (9, (2, 7168))],
)
def test_attention_residual_equals_fp64(num_sources, shape):
    case = inputs(num_sources, shape)
    assert_all_close(run(*case, "triton"), exact(*case), num_sources)


def test_one_source_is_returned_as_it_is():
    leaves, grad = inputs(1, (5, 16))
    mix, d_source, d_norm, d_query = run(leaves, grad, "triton")
    assert torch.equal(mix, leaves[0]) and torch.equal(d_source, grad)
    assert (d_norm == 0).all() and (d_query == 0).all()


def test_programs_that_take_several_tokens_sum_them_all(monkeypatch):
    # 15 tokens over 4 programs: 4, 4, 4 and 3
    monkeypatch.setattr(triton_kernels, "BACKWARD_PROGRAMS", 4)
    case = inputs(3, (15, 100))
    assert_all_close(run(*case, "triton"), exact(*case), 3)


def test_programs_left_without_a_token_add_nothing(monkeypatch):
    # 10 tokens over 7 programs: 2 each, so the last two have none
    monkeypatch.setattr(triton_kernels, "BACKWARD_PROGRAMS", 7)
    case = inputs(3, (10, 100))
    assert_all_close(run(*case, "triton"), exact(*case), 3)


def test_large_scores_stay_finite():
    leaves, grad = inputs(3, (4, 64))
    leaves[-1] = (leaves[-1].detach() * 1e4).requires_grad_()
    for result in run(leaves, grad, "triton"):
        assert result.isfinite().all()


def test_frozen_inputs_get_no_gradient():
    leaves, grad = inputs(3, (4, 16))
    expected = run(leaves, grad, "triton")
    frozen = [leaves[1], leaves[-2], leaves[-1]]
    for tensor in frozen:
        tensor.requires_grad_(False)
    attention_residual(leaves[:3], *leaves[3:], eps=EPS, backend="triton").backward(grad)
    assert all(t.grad is None for t in frozen)
    assert torch.equal(leaves[0].grad, expected[1]) and torch.equal(leaves[2].grad, expected[3])


def test_no_tokens_give_an_empty_mix_and_zero_weight_gradients():
    mix, *_, d_norm, d_query = run(*inputs(3, (0, 16)), "triton")
    assert mix.shape == (0, 16)
    assert d_norm.tolist() == d_query.tolist() == [0.0] * 16


def test_strided_sources_equal_their_contiguous_copies():
    leaves, grad = inputs(3, (9, 100))
    expected = run(leaves, grad, "triton")
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in leaves[:3]]
    actual = run([*strided, *leaves[3:]], grad.T.contiguous().T, "triton")
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_repeated_runs_are_bit_equal():
    case = inputs(9, (3, 100))
    first, second = run(*case, "triton"), run(*case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
