"""The chunked loss with its Triton kernel in fp32, in the interpreter as shipped."""

import pytest
import torch

from closeness import assert_close
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy, triton_kernels
from linear_cross_entropy_cases import IGNORED, NAMES, exact, inputs, run


def assert_all_close(results, expected, bound=2e-6):
    for name, actual, want in zip(NAMES, results, expected, strict=True):
        assert_close(name, actual, want, max_rel=bound, rms_rel=bound)


@pytest.mark.parametrize(
    ("num_tokens", "width", "vocabulary", "chunk_tokens"),
    [(63, 24, 100, 7), (63, 24, 100, 1024), (100, 63, 1000, 21)],
)
def test_linear_cross_entropy_equals_fp64(num_tokens, width, vocabulary, chunk_tokens):
    case = inputs(num_tokens, width, vocabulary)
    assert_all_close(run(*case, chunk_tokens=chunk_tokens, backend="triton"), exact(*case))


def test_the_published_vocabulary_fits():
    case = inputs(6, 4, 163_840)
    # fp32 sums of 163,840 terms in the matmul: the reference is as far off
    assert_all_close(run(*case, chunk_tokens=4, backend="triton"), exact(*case), 1e-5)


def test_a_vocabulary_of_many_blocks_with_a_ragged_end(monkeypatch):
    monkeypatch.setattr(triton_kernels, "BLOCK_V", 64)
    case = inputs(20, 24, 300)
    assert_all_close(run(*case, backend="triton"), exact(*case))


def test_very_large_logits_stay_finite():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    case = ((hidden.detach() * 1e4).requires_grad_(), weight, targets, grad)
    assert_all_close(run(*case, backend="triton"), exact(*case))


def test_all_ignored_gives_zeros():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    for result in run(hidden, weight, torch.full_like(targets, IGNORED), grad, backend="triton"):
        assert (result == 0).all()


def test_a_target_out_of_range_makes_its_own_loss_nan_where_it_cannot_be_read():
    logits = torch.randn(3, 20)
    targets = torch.tensor([20, 3, -1])
    nll = triton_kernels.cross_entropy_(logits, targets, IGNORED, with_gradient=True)
    assert nll.isnan().tolist() == [True, False, True]
    assert logits.isnan().all(1).tolist() == [True, False, True]


def test_without_gradients_the_logits_are_only_read():
    logits = torch.randn(3, 20)
    before = logits.clone()
    targets = torch.tensor([0, 3, IGNORED])
    nll = triton_kernels.cross_entropy_(logits, targets, IGNORED, with_gradient=False)
    assert torch.equal(logits, before)
    assert_close(
        "nll",
        nll,
        torch.nn.functional.cross_entropy(before.double(), targets, reduction="none"),
        max_rel=1e-6,
        rms_rel=1e-6,
    )


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=4, backend="triton").backward(grad)
    assert weight.grad is None and hidden.grad is not None


def test_no_tokens_give_no_loss_and_a_zero_weight_gradient():
    nll, d_hidden, d_weight = run(*inputs(0, 8, 20), backend="triton")
    assert nll.shape == (0,) and d_hidden.shape == (0, 8)
    assert (d_weight == 0).all()


def test_strided_hidden_equals_its_contiguous_copy():
    hidden, weight, targets, grad = inputs(63, 24, 100)
    strided = hidden.detach().T.contiguous().T.requires_grad_()
    wide_targets = torch.stack([targets, targets], 1)[:, 0]
    assert_all_close(
        run(strided, weight, wide_targets, grad, backend="triton"),
        run(hidden, weight, targets, grad, backend="triton"),
        1e-6,
    )


# the interpreter runs one program after the other: what could differ is seen on a GPU
@pytest.mark.slow
def test_repeated_runs_are_bit_equal():
    case = inputs(63, 24, 100)
    first, second = run(*case, backend="triton"), run(*case, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
