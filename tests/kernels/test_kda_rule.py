"""The chunked delta rule is the recurrent one, for every chunk size, length and document split."""

import pytest
import torch

from closeness import relative_l2
from cpu_cases import needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.kda_rule import kda_rule, reference
from k3tune_kernels.kda_rule.chunked import kda_chunked
from kda_rule_cases import operands, random_bounds, whole_rows

LENGTHS = (1, 4, 5, 6, 15, 16, 17, 63, 64, 65, 130)
SPLITS = pytest.mark.parametrize("split", [whole_rows, random_bounds])


def case(length: int, **options) -> list[torch.Tensor]:
    return operands(2, length, 3, 24, **options)


@SPLITS
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
def test_chunked_equals_recurrent(chunk_size, length, split):
    bounds = split(2, length)
    *exact, begin = case(length, dtype=torch.float64)
    expected = reference.kda_rule(*exact, bounds, begin)
    *tensors, begin = case(length)
    actual = kda_chunked(*tensors, bounds, begin, chunk_size)
    for one, other in zip(actual, expected, strict=True):
        assert relative_l2(one, other) <= 1e-6


@SPLITS
@pytest.mark.parametrize("rule", [reference.kda_rule, kda_chunked])
def test_no_state_is_a_state_of_zero(rule, split):
    *tensors, begin = case(70)
    expected = rule(*tensors, split(2, 70), begin * 0)
    actual = rule(*tensors, split(2, 70), None)
    for one, other in zip(actual, expected, strict=True):
        assert relative_l2(one, other) <= 1e-6


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_strongest_decay_stays_in_range(chunk_size):
    *tensors, begin = case(100, shift=8.0)
    assert tensors[3].mean() < -4.9
    expected, _ = reference.kda_rule(*tensors, whole_rows(2, 100), begin)
    actual, _ = kda_chunked(*tensors, whole_rows(2, 100), begin, chunk_size)
    assert torch.isfinite(actual).all()
    assert relative_l2(actual, expected) <= 1e-5


def test_identical_keys_do_not_lose_precision():
    # the inverse of a full lower triangle of ones: where a power series would cancel
    q, k, v, log_decay, beta, begin = case(64)
    k = k[:, :1].expand_as(k)
    log_decay, beta = torch.full_like(log_decay, -1e-6), torch.ones_like(beta)
    bounds = whole_rows(2, 64)
    expected, _ = reference.kda_rule(q, k, v, log_decay, beta, bounds, begin)
    actual, _ = kda_chunked(q, k, v, log_decay, beta, bounds, begin, chunk_size=64)
    assert relative_l2(actual, expected) <= 1e-5


@SPLITS
def test_gradients_of_both_forms_are_right(split):
    tensors = [x.requires_grad_() for x in operands(2, 7, 2, 3, dtype=torch.float64)]
    bounds = split(2, 7)

    def chunked(*tensors):
        return kda_chunked(*tensors[:5], bounds, tensors[5], 4)

    def recurrent(*tensors):
        return reference.kda_rule(*tensors[:5], bounds, tensors[5])

    assert torch.autograd.gradcheck(chunked, tensors)
    assert torch.autograd.gradcheck(recurrent, tensors)


@pytest.mark.parametrize("length", [1, 40])
def test_rows_are_documents_where_nothing_bounds_them(length):
    *tensors, begin = case(length)
    expected = kda_rule(*tensors, whole_rows(2, length), begin, backend="reference")
    actual = kda_rule(*tensors, None, begin, backend="reference")
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@needs_library
def test_what_the_native_kernel_does_not_take_runs_chunked(recwarn):
    for tensors in (case(5), operands(1, 5, 1, 16, dtype=torch.float64)):
        *tensors, begin = tensors
        for backend in ("auto", "cpu"):
            out, _ = kda_rule(*tensors, None, begin, backend=backend)
            assert out.dtype == tensors[0].dtype
            assert dispatch.explain("kda_rule").backend == "reference"
    assert not recwarn.list


@pytest.mark.parametrize(
    "bounds",
    [[0, 3, 5], [0, 5, 5, 10], [1, 5, 10], [0, 7, 10], [0, 5, 12], [5, 10], [0, 6, 5, 10], [], 10],
    ids=str,
)
def test_bounds_that_fill_no_rows_are_an_error(bounds):
    *tensors, _ = case(5)
    with pytest.raises(ValueError, match="fill 2 rows of 5 tokens each, got"):
        kda_rule(*tensors, torch.tensor(bounds))


def test_shapes_and_dtypes_that_do_not_fit_are_an_error():
    q, k, v, log_decay, beta, begin = case(5)
    for wrong in (
        (q, k[:, :4], v, log_decay, beta),
        (q, k, v, log_decay, beta[..., None]),
        (q, k, v.double(), log_decay, beta),
    ):
        with pytest.raises(ValueError, match="and one dtype, got"):
            kda_rule(*wrong)
    with pytest.raises(ValueError, match="and one dtype, got"):
        kda_rule(q, k, v, log_decay, beta, None, begin[:1])


def test_other_ranks_and_dtypes_are_an_error():
    q, k, v, log_decay, beta, _ = case(5)
    with pytest.raises(ValueError, match="expects q"):
        kda_rule(q[0], k[0], v[0], log_decay[0], beta[0])
    with pytest.raises(ValueError, match="in fp32 or fp64, got"):
        kda_rule(*(x.bfloat16() for x in (q, k, v, log_decay, beta)))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(2, 0, 1, 16), (0, 5, 1, 16)], ids=["tokens", "rows"])
def test_nothing_leaves_the_state_as_it_was(backend, shape):
    *tensors, begin = operands(*shape)
    out, end = kda_rule(*tensors, None, begin, backend=backend)
    assert out.shape == shape and torch.equal(end, begin)


def test_a_documents_nan_is_its_own():
    *tensors, _ = operands(1, 6, 1, 16)
    tensors[2][0, 1] = torch.nan
    for rule in (reference.kda_rule, kda_chunked):
        out, end = rule(*tensors, torch.tensor([0, 3, 6]), None)
        assert out[0, 1:3].isnan().all() and out[0, 3:].isfinite().all() and end.isfinite().all()
