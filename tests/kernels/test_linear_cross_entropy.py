"""The chunked head and loss: values, gradients, and the bound on logits alive."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from closeness import assert_close
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy
from linear_cross_entropy_cases import IGNORED, NAMES, exact, inputs, run


@pytest.mark.parametrize("chunk_tokens", [1, 7, 21, 63, 1024])
def test_linear_cross_entropy_equals_the_equation_in_fp64(chunk_tokens):
    case = inputs(63, 24, 100, dtype=torch.float64)
    for name, actual, expected in zip(
        NAMES, run(*case, chunk_tokens=chunk_tokens), exact(*case), strict=True
    ):
        assert_close(name, actual, expected, max_rel=1e-13, rms_rel=1e-13)


def test_gradients_pass_gradcheck():
    hidden, weight, targets, _ = inputs(6, 4, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens=4), (hidden, weight)
    )


def test_fp32_is_within_2e_6_of_fp64():
    case = inputs(100, 63, 1000)
    for name, actual, expected in zip(NAMES, run(*case), exact(*case), strict=True):
        assert_close(name, actual, expected, max_rel=2e-6, rms_rel=2e-6)


def test_bf16_is_no_worse_than_the_unfused_head():
    hidden, weight, targets, grad = inputs(100, 64, 1000, dtype=torch.bfloat16)
    expected = exact(hidden, weight, targets, grad)
    actual = run(hidden, weight, targets, grad)
    logits = (hidden @ weight.T).float()
    unfused = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    plain = (unfused, *torch.autograd.grad(unfused, (hidden, weight), grad))
    for name, ours, theirs, want in zip(NAMES, actual, plain, expected, strict=True):
        bound = 1.1 * ((theirs.double() - want).norm() / want.norm()).item()
        assert_close(name, ours.double(), want, max_rel=2e-2, rms_rel=bound)


def test_ignored_tokens_have_no_loss_and_no_gradient():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    nll, d_hidden, _ = run(hidden, weight, targets, grad)
    ignored = targets == IGNORED
    assert (nll[ignored] == 0).all() and (d_hidden[ignored] == 0).all()
    assert (nll[~ignored] > 0).all()


def test_all_ignored_gives_zeros():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    for result in run(hidden, weight, torch.full_like(targets, IGNORED), grad):
        assert (result == 0).all()


def test_what_an_ignored_token_holds_does_not_matter():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    expected = run(hidden, weight, targets, grad)
    poisoned = hidden.detach().clone()
    poisoned[targets == IGNORED] = torch.nan
    for actual, want in zip(
        run(poisoned.requires_grad_(), weight, targets, grad), expected, strict=True
    ):
        assert torch.equal(actual, want)


def test_an_ignore_index_inside_the_vocabulary_is_ignored():
    hidden, weight, targets, _ = inputs(11, 8, 20)
    targets = targets.clamp(min=0)
    nll = linear_cross_entropy(hidden, weight, targets, ignore_index=int(targets[0]))
    assert ((nll == 0) == (targets == targets[0])).all()


def test_no_tokens_give_no_loss_and_a_zero_weight_gradient():
    hidden, weight, targets, grad = inputs(0, 8, 20)
    nll, d_hidden, d_weight = run(hidden, weight, targets, grad)
    assert nll.shape == (0,) and d_hidden.shape == (0, 8)
    assert (d_weight == 0).all()


def test_very_large_logits_stay_finite():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    large = (hidden.detach() * 1e4).requires_grad_()
    for name, actual, expected in zip(
        NAMES,
        run(large, weight, targets, grad),
        exact(large, weight, targets, grad),
        strict=True,
    ):
        assert_close(name, actual, expected, max_rel=2e-6, rms_rel=2e-6)


def test_strided_hidden_equals_its_contiguous_copy():
    hidden, weight, targets, grad = inputs(63, 24, 100)
    expected = run(hidden, weight, targets, grad)
    strided = hidden.detach().T.contiguous().T.requires_grad_()
    for name, actual, want in zip(
        NAMES, run(strided, weight, targets, grad), expected, strict=True
    ):
        assert_close(name, actual, want, max_rel=1e-6, rms_rel=1e-6)


def test_the_matmul_runs_in_the_weights_dtype_and_gradients_keep_their_tensors_dtype():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    narrow = weight.detach().bfloat16().requires_grad_()
    nll, d_hidden, d_weight = run(hidden, narrow, targets, grad)
    rounded = hidden.detach().bfloat16().requires_grad_()
    assert torch.equal(nll, run(rounded, narrow, targets, grad)[0])
    assert (nll.dtype, d_hidden.dtype, d_weight.dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )


def test_autocast_changes_nothing():
    case = inputs(11, 8, 20)
    plain = run(*case)
    with torch.autocast("cpu", torch.bfloat16):
        for actual, expected in zip(run(*case), plain, strict=True):
            assert torch.equal(actual, expected)


def test_a_frozen_head_gets_no_gradient_and_is_not_kept():
    hidden, weight, targets, grad = inputs(11, 8, 20)
    weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
        nll.backward(grad)
    assert weight.grad is None and hidden.grad is not None
    assert [tuple(t.shape) for t in kept] == [(11, 8)]


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, targets, _ = inputs(11, 8, 20)
    matmuls = []

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.name():
                matmuls.append(function.name())
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Matmuls():
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    assert len(matmuls) == 3


class LogitsAlive(TorchDispatchMode):
    """Counts the storage of every living tensor of at least ``smallest`` elements."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.alive, self.peak = smallest, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.smallest:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.alive:
                    self.alive[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
                    weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen head", "trained head"])
def test_no_more_than_a_chunk_of_logits_is_alive(train_weight):
    # narrow enough that a tensor of a chunk's size can only be logits
    hidden, weight, targets, grad = inputs(40, 2, 500)
    weight.requires_grad_(train_weight)
    leaves = [hidden, weight] if train_weight else [hidden]
    with LogitsAlive(smallest=8 * 500) as logits:
        nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
        torch.autograd.grad(nll, leaves, grad)
    assert logits.peak == 8 * 500


def test_the_published_vocabulary_fits():
    hidden, weight, targets, grad = inputs(9, 4, 163_840)
    for name, actual, expected in zip(
        NAMES,
        run(hidden, weight, targets, grad, chunk_tokens=4),
        exact(hidden, weight, targets, grad),
        strict=True,
    ):
        assert_close(name, actual, expected, max_rel=1e-5, rms_rel=1e-5)


def test_a_target_out_of_range_is_named():
    hidden, weight, targets, _ = inputs(11, 8, 20)
    targets[4], targets[6] = 20, -1
    with pytest.raises(ValueError, match=r"from 0 to 19.* got 20 at token 4"):
        linear_cross_entropy(hidden, weight, targets)


def test_unusable_inputs_are_named():
    hidden, weight, targets, _ = inputs(11, 8, 20)
    with pytest.raises(ValueError, match=r"got \(11, 8\) and \(20, 7\)"):
        linear_cross_entropy(hidden, weight[:, 1:], targets)
    with pytest.raises(ValueError, match=r"shape \(11,\).*got \(10,\) torch.int64"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match=r"got \(11,\) torch.int32"):
        linear_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=0)
