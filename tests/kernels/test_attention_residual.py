"""The attention-residual mixer: the equation, every gradient, and what it keeps in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_residual_cases import EPS, exact, inputs, names, run
from closeness import assert_close
from k3tune_kernels.attention_residual import attention_residual


@pytest.mark.parametrize("num_sources", [1, 2, 9, 12])
def test_attention_residual_equals_the_equation_in_fp64(num_sources):
    leaves, grad = inputs(num_sources, (2, 3, 63), dtype=torch.float64)
    for name, actual, expected in zip(
        names(num_sources), run(leaves, grad), exact(leaves, grad), strict=True
    ):
        if num_sources == 1 and name in ("dnorm", "dquery"):
            assert actual.abs().max() == 0
            continue
        assert_close(name, actual, expected, max_rel=1e-12, rms_rel=1e-12)


def test_gradients_pass_gradcheck():
    leaves, _ = inputs(3, (2, 5), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: attention_residual(t[:-2], *t[-2:], eps=EPS), tuple(leaves)
    )


@pytest.mark.parametrize("num_sources", [2, 9])
def test_fp32_mix_and_gradients_are_within_2e_6_of_fp64(num_sources):
    leaves, grad = inputs(num_sources, (100, 1000))
    for name, actual, expected in zip(
        names(num_sources), run(leaves, grad), exact(leaves, grad), strict=True
    ):
        assert_close(name, actual, expected, max_rel=2e-6, rms_rel=2e-6)


def test_bf16_is_computed_in_fp32_and_rounded_once():
    leaves, grad = inputs(4, (63, 100), dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    for actual, expected in zip(run(leaves, grad), run(wide, grad.float()), strict=True):
        assert torch.equal(actual, expected.bfloat16())


def test_weights_may_be_wider_than_the_sources():
    leaves, grad = inputs(3, (8, 32), dtype=torch.bfloat16)
    leaves[-2:] = [x.detach().float().requires_grad_() for x in leaves[-2:]]
    mix, *_, d_norm, d_query = run(leaves, grad)
    assert mix.dtype == torch.bfloat16
    assert d_norm.dtype == d_query.dtype == torch.float32


def test_one_source_is_returned_as_it_is():
    leaves, grad = inputs(1, (5, 16))
    assert torch.equal(run(leaves, grad)[0], leaves[0])


def test_equal_sources_mix_to_themselves():
    (source, norm_weight, query_weight), _ = inputs(1, (5, 16))
    mix = attention_residual([source] * 4, norm_weight, query_weight, eps=EPS)
    assert_close("mix", mix, source, max_rel=1e-6, rms_rel=1e-6)


def test_large_scores_stay_finite():
    leaves, grad = inputs(3, (4, 64))
    leaves[-1] = (leaves[-1].detach() * 1e4).requires_grad_()
    for result in run(leaves, grad):
        assert result.isfinite().all()


def test_a_zero_source_has_a_finite_gradient():
    leaves, grad = inputs(3, (4, 64))
    leaves[1] = torch.zeros(4, 64, requires_grad=True)
    for name, actual, expected in zip(
        names(3), run(leaves, grad), exact(leaves, grad), strict=True
    ):
        assert_close(name, actual, expected, max_rel=2e-6, rms_rel=2e-6)


def test_sources_are_kept_by_reference_and_never_stacked():
    leaves, grad = inputs(9, (16, 64), dtype=torch.bfloat16)
    kept, largest = [], 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        Sizes(),
    ):
        run(leaves, grad)
    pointers = {t.data_ptr() for t in leaves}
    copies = [t for t in kept if t.data_ptr() not in pointers]
    assert [tuple(t.shape) for t in copies] == [(16, 9), (16, 9)]
    assert largest == 16 * 64


def test_autocast_changes_nothing():
    leaves, grad = inputs(3, (4, 16))
    plain = run(leaves, grad)
    with torch.autocast("cpu", torch.bfloat16):
        for actual, expected in zip(run(leaves, grad), plain, strict=True):
            assert torch.equal(actual, expected)


def test_frozen_inputs_get_no_gradient():
    leaves, grad = inputs(3, (4, 16))
    frozen = [leaves[1], leaves[-2], leaves[-1]]
    for tensor in frozen:
        tensor.requires_grad_(False)
    attention_residual(leaves[:3], *leaves[3:], eps=EPS).backward(grad)
    assert all(t.grad is None for t in frozen)
    assert leaves[0].grad is not None and leaves[2].grad is not None


def test_no_tokens_give_an_empty_mix_and_zero_weight_gradients():
    leaves, grad = inputs(3, (0, 16))
    mix, *_, d_norm, d_query = run(leaves, grad)
    assert mix.shape == (0, 16)
    assert d_norm.tolist() == d_query.tolist() == [0.0] * 16


def test_strided_sources_equal_their_contiguous_copies():
    leaves, grad = inputs(3, (63, 100))
    expected = run(leaves, grad)
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in leaves[:3]]
    for name, actual, want in zip(
        names(3), run([*strided, *leaves[3:]], grad), expected, strict=True
    ):
        assert_close(name, actual, want, max_rel=1e-6, rms_rel=1e-6)


def test_unusable_inputs_are_named():
    (*sources, norm_weight, query_weight), _ = inputs(3, (4, 16))
    with pytest.raises(ValueError, match="at least one source, got none"):
        attention_residual([], norm_weight, query_weight, eps=EPS)
    with pytest.raises(ValueError, match=r"\(4, 15\) torch.float32 for source 1"):
        attention_residual([sources[0], sources[1][:, 1:]], norm_weight, query_weight, eps=EPS)
    with pytest.raises(ValueError, match=r"query_weight of shape \(16,\).*got \(1, 16\)"):
        attention_residual(sources, norm_weight, query_weight[None], eps=EPS)
