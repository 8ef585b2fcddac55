"""The native delta rule: every instruction set against the recurrence in fp64."""

import pytest
import torch

from closeness import assert_close, relative_l2
from cpu_cases import ISAS, assert_threads_change_no_bit, needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.kda_rule import kda_rule, reference
from k3tune_kernels.kda_rule.cpu_op import kda_rule_cpu
from kda_rule_cases import NAMES, differentiate, operands, random_bounds, whole_rows

pytestmark = needs_library
ON_EACH = pytest.mark.parametrize("isa", ISAS)

# tokens the kernel takes at a time
SPAN = 64


def compare(isa, tensors, bounds, bound=1e-6):
    """Outputs and gradients on one instruction set against fp64."""

    def native(*arguments):
        return kda_rule_cpu(*arguments, isa=isa)

    actual = differentiate(native, tensors, bounds)
    exact = differentiate(reference.kda_rule, [x.double() for x in tensors], bounds)
    for name in NAMES:
        assert_close(name, actual[name], exact[name], max_rel=4 * bound, rms_rel=bound)


@ON_EACH
@pytest.mark.parametrize(
    ("heads", "width", "length"),
    [(6, 32, 2 * SPAN + 3), (1, 16, SPAN), (3, 48, SPAN + 1), (2, 128, SPAN + 6), (2, 64, 20)],
)
def test_outputs_states_and_gradients_of_packed_documents(isa, heads, width, length):
    compare(isa, operands(2, length, heads, width), random_bounds(2, length, 0.04))


@ON_EACH
@pytest.mark.parametrize("length", [1, 2, SPAN - 1, SPAN, SPAN + 1, 4 * SPAN, 5 * SPAN + 7])
def test_a_document_may_be_of_any_length(isa, length):
    compare(isa, operands(2, length, 2, 32), whole_rows(2, length))


@ON_EACH
def test_documents_of_one_token(isa):
    compare(isa, operands(3, 9, 2, 16), torch.arange(28))


@ON_EACH
@pytest.mark.parametrize("shift", [8.0, -12.0], ids=["strongest decay", "hardly any"])
def test_decays_at_both_ends_of_their_range(isa, shift):
    compare(isa, operands(1, 3 * SPAN, 2, 32, shift=shift), whole_rows(1, 3 * SPAN), bound=2e-6)


@pytest.mark.parametrize("cut", [1, 20, SPAN, 99])
def test_a_sequence_may_be_cut_anywhere(cut):
    *whole, begin = operands(1, 100, 2, 32)
    bounds = torch.tensor([0, 30, 100])
    expected, expected_end = kda_rule(*whole, bounds, begin, backend="cpu")
    parts, state = [], begin
    for start, stop in ((0, cut), (cut, 100)):
        inside = bounds[(bounds > start) & (bounds < stop)]
        part = torch.cat([torch.tensor([start]), inside, torch.tensor([stop])]) - start
        tensors = [x[:, start:stop] for x in whole]
        out, state = kda_rule(*tensors, part, state, backend="cpu")
        parts.append(out)
    assert relative_l2(torch.cat(parts, 1), expected) <= 1e-6
    assert relative_l2(state, expected_end) <= 1e-6


def test_a_state_is_that_of_a_rows_first_and_last_document():
    *tensors, begin = operands(2, 12, 1, 16)
    bounds = torch.tensor([0, 5, 12, 24])
    out, end = kda_rule(*tensors, bounds, begin, backend="cpu")
    fresh, fresh_end = kda_rule(*tensors, bounds, backend="cpu")
    changed = (out != fresh).flatten(2).any(2)
    assert changed.tolist() == [[True] * 5 + [False] * 7, [True] * 12]
    assert torch.equal(end[0], fresh_end[0]) and not torch.equal(end[1], fresh_end[1])
    alone = [x[:1, 5:] for x in tensors]
    assert torch.equal(kda_rule(*alone, backend="cpu")[1][0], end[0])


def test_strided_operands_are_those_of_contiguous_ones():
    tensors = operands(2, 10, 3, 16)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    bounds = random_bounds(2, 10)
    expected, actual = (differentiate(kda_rule_cpu, x, bounds) for x in (tensors, strided))
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


def test_an_input_that_takes_no_gradient_gets_none():
    *tensors, begin = operands(1, 6, 1, 16)
    tensors[2].requires_grad_()
    out, _ = kda_rule(*tensors, None, begin, backend="cpu")
    out.sum().backward()
    assert tensors[2].grad is not None
    assert all(x.grad is None for x in (*tensors[:2], *tensors[3:], begin))


def test_the_output_or_the_state_alone_may_be_used():
    bounds = random_bounds(2, 40)
    for index in (0, 1):
        leaves = [x.requires_grad_() for x in operands(2, 40, 2, 16)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        results = [
            torch.autograd.grad(
                rule(*x[:5], bounds, x[5])[index].square().sum(),
                x,
                allow_unused=True,
                materialize_grads=True,
            )
            for rule, x in ((kda_rule_cpu, leaves), (reference.kda_rule, exact))
        ]
        for name, one, other in zip(NAMES[2:], *results, strict=True):
            assert_close(name, one, other, max_rel=4e-6, rms_rel=1e-6)


def test_without_gradients_the_result_has_the_same_bits():
    *tensors, begin = operands(2, 80, 2, 32)
    with torch.no_grad():
        plain = kda_rule(*tensors, None, begin, backend="cpu")
    tracked = kda_rule(*(x.requires_grad_() for x in tensors), None, begin, backend="cpu")
    assert all(torch.equal(one, other) for one, other in zip(plain, tracked, strict=True))


def test_neither_threads_nor_other_rows_change_a_bit():
    def run():
        tensors, bounds = operands(3, 300, 4, 32), random_bounds(3, 300, 0.02)
        found = differentiate(kda_rule_cpu, tensors, bounds)
        row = differentiate(kda_rule_cpu, [x[:1] for x in tensors], bounds[bounds <= 300])
        assert torch.equal(row["out"], found["out"][:1])
        return [found[name] for name in NAMES]

    assert_threads_change_no_bit(run)


def test_what_fades_below_the_normal_numbers_is_zero_and_changes_nothing_outside():
    q, k, v, log_decay, beta, _ = operands(1, 400, 1, 16)
    log_decay, v[:, 1:] = torch.full_like(log_decay, -0.5), 0
    _, end = kda_rule(q, k, v, log_decay, beta, backend="cpu")
    assert not end.any()
    assert (torch.tensor([1e-39]) * 1.0).item() > 0


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 5, 0, 16)], ids=["rows", "heads"])
def test_nothing_of_something_is_no_problem(shape):
    *tensors, begin = (x.requires_grad_() for x in operands(*shape))
    out, end = kda_rule(*tensors, None, begin, backend="cpu")
    assert out.shape == shape and end.shape == (*shape[::2], 16, 16)
    (out.sum() + end.sum()).backward()


def test_the_native_kernel_is_what_runs():
    *tensors, _ = operands(1, 4, 1, 16)
    for backend in ("auto", "cpu"):
        kda_rule(*tensors, backend=backend)
        assert dispatch.explain("kda_rule").backend == "cpu"
