"""The short convolution: the equation in fp64, every gradient, and the edges of documents."""

from functools import partial

import pytest
import torch

from closeness import assert_close
from cpu_cases import ISAS, assert_threads_change_no_bit, needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.short_convolution import cpu_op, short_convolution

TAPS = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# rows, tokens, channels: whole vectors, odd widths, several blocks, fewer tokens than taps
SHAPES = pytest.mark.parametrize(
    "shape", [(2, 9, 32), (3, 20, 63), (1, 11, 600), (2, 2, 16), (2, 1, 5), (2, 0, 16), (0, 4, 16)]
)
NAMES = ("out", "dx", "d_past", "d_weight")


def operands(shape, dtype=torch.float32, *, documents=True):
    """Leaves (inputs, past, weight), the reach of documents of four tokens, and a gradient."""
    rows, tokens, channels = shape
    x, past = (torch.randn(rows, n, channels).to(dtype) for n in (tokens, TAPS - 1))
    weight = 0.5 * torch.randn(channels, 1, TAPS)
    # the first document of a row began in its past
    ids = (torch.arange(1 - TAPS, tokens) // 4).clamp(min=0)
    windows = torch.stack([ids[j : j + tokens] for j in range(TAPS - 1)], -1)
    reach = (windows == ids[TAPS - 1 :, None]).expand(rows, -1, -1) if documents else None
    grad = torch.randn(shape).to(dtype)
    return [leaf.requires_grad_() for leaf in (x, past, weight)], reach, grad


def exact(leaves, reach, grad):
    """Output and gradients from the equation as written, a token at a time, by autograd in fp64."""
    x, past, weight = leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    inputs, outs = torch.cat([past, x], 1), []
    for token in range(x.shape[1]):
        read = inputs[:, token : token + TAPS]
        if reach is not None:
            seen = torch.cat([reach[:, token], reach.new_ones(len(x), 1)], 1)
            read = read * seen[..., None]
        total = (read * weight[:, 0].T).sum(1)
        outs.append(total * torch.sigmoid(total))
    out = torch.stack(outs, 1) if outs else x * weight[:, 0, 0]
    gradients = torch.autograd.grad(out, leaves, grad.double(), allow_unused=True)
    return out, *(
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    )


def run(leaves, reach, grad, backend):
    """The op's output and the gradients of its leaves."""
    out = short_convolution(*leaves, reach, backend=backend)
    return out, *torch.autograd.grad(out, leaves, grad)


@SHAPES
@pytest.mark.parametrize("documents", [True, False])
def test_the_reference_is_the_equation(shape, documents):
    leaves, reach, grad = operands(shape, torch.float64, documents=documents)
    actual = run(leaves, reach, grad, "reference")
    for name, one, other in zip(NAMES, actual, exact(leaves, reach, grad), strict=True):
        # the weight stays fp32, and so does its gradient
        bound = 1e-12 if name != "d_weight" else 1e-7
        assert_close(name, one, other, max_rel=bound, rms_rel=bound)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@DTYPES
@SHAPES
@pytest.mark.parametrize("documents", [True, False])
def test_the_native_kernels_on_each_instruction_set(isa, dtype, shape, documents):
    leaves, reach, grad = operands(shape, dtype, documents=documents)
    plain = [leaf.detach() for leaf in leaves]
    needs = {"needs_past": True, "needs_weight": True}
    actual = (
        cpu_op.forward(*plain, reach, isa=isa),
        *cpu_op.backward(grad, *plain, reach, **needs, isa=isa),
    )
    for name, one, other in zip(NAMES, actual, exact(leaves, reach, grad), strict=True):
        assert one.dtype == (torch.float32 if name == "d_weight" else dtype)
        bound = 4e-3 if one.dtype is torch.bfloat16 else 1e-6
        assert_close(name, one, other, max_rel=bound, rms_rel=bound)


@needs_library
@DTYPES
def test_autograd_gives_what_the_reference_gives(dtype):
    leaves, reach, grad = operands((2, 30, 48), dtype)
    actual = run(leaves, reach, grad, "cpu")
    assert dispatch.explain("short_convolution").backend == "cpu"
    bound = 2e-6 if dtype is torch.float32 else 8e-3
    expected = run(leaves, reach, grad, "reference")
    for name, one, other in zip(NAMES, actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert_close(name, one, other, max_rel=bound, rms_rel=bound)


@needs_library
def test_a_document_is_as_if_alone():
    leaves, reach, grad = operands((1, 8, 40))
    x, past, weight = (leaf.detach() for leaf in leaves)
    # whatever stands before the second document, the past included, is not even read
    x[:, :4], past[:] = float("nan"), float("inf")
    grad[:, :4] = 0
    needs = {"needs_past": True, "needs_weight": False}
    out = cpu_op.forward(x, past, weight, reach)
    dx, _, _ = cpu_op.backward(grad, x, past, weight, reach, **needs)
    nothing = torch.zeros_like(past)
    assert torch.equal(out[:, 4:], cpu_op.forward(x[:, 4:], nothing, weight, None))
    alone = cpu_op.backward(grad[:, 4:], x[:, 4:], nothing, weight, None, **needs)
    assert torch.equal(dx[:, 4:], alone[0])


@needs_library
def test_a_row_in_two_calls_is_the_row():
    (x, past, weight), _, grad = operands((2, 10, 48), documents=False)
    whole = run([x, past, weight], None, grad, "cpu")
    begun = short_convolution(x[:, :6], past, weight, None, backend="cpu")
    ended = short_convolution(x[:, 6:], x[:, 3:6], weight, None, backend="cpu")
    out = torch.cat([begun, ended], 1)
    assert torch.equal(out, whole[0])
    gradients = torch.autograd.grad(out, (x, past, weight), grad)
    for name, one, other in zip(NAMES[1:], gradients, whole[1:], strict=True):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


@needs_library
def test_strided_operands_equal_their_copies():
    leaves, reach, grad = operands((2, 12, 24))
    expected = run(leaves, reach, grad, "cpu")
    strided = [leaf.detach().mT.contiguous().mT.requires_grad_() for leaf in leaves]
    actual = run(strided, reach.mT.contiguous().mT, grad.mT.contiguous().mT, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@needs_library
def test_what_needs_no_gradient_gets_none():
    leaves, reach, grad = operands((2, 12, 24))
    _, dx, _, _ = run(leaves, reach, grad, "cpu")
    x, past, weight = leaves
    past.requires_grad_(False)
    weight.requires_grad_(False)
    short_convolution(x, past, weight, reach, backend="cpu").backward(grad)
    assert past.grad is None and weight.grad is None and torch.equal(x.grad, dx)


@needs_library
def test_the_number_of_threads_changes_no_bit():
    def once():
        return run(*operands((3, 300, 300)), "cpu")

    assert_threads_change_no_bit(once)


@needs_library
def test_other_taps_and_dtypes_are_the_references():
    (x, past, weight), _, _ = operands((2, 6, 8))
    convolve = partial(short_convolution, reach_BTP=None, backend="cpu")
    convolve(x, past[:, 1:], weight[..., 1:])
    explain = partial(dispatch.explain, "short_convolution")
    assert explain() == dispatch.Choice("reference", "its CPU kernel takes 4 taps, found 3")
    convolve(x, past.bfloat16(), weight)
    assert "a past of the inputs' dtype and fp32 taps" in explain().reason
    convolve(x.double(), past.double(), weight)
    assert "found torch.float64" in explain().reason


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_shapes_that_do_not_fit_are_an_error(backend):
    x, past, weight = torch.ones(2, 5, 8), torch.zeros(2, 3, 8), torch.ones(8, 1, 4)
    reach = torch.ones(2, 5, 3, dtype=torch.bool)
    for wrong in (
        (x, past[:, :2], weight, None),
        (x, past[:1], weight, None),
        (x, past, weight[:1], None),
        (x, past, weight, reach.float()),
        (x, past, weight, reach[:1]),
        (x, past, weight, reach[:, :4]),
    ):
        with pytest.raises(ValueError, match="expects past, weight and reach"):
            short_convolution(*wrong, backend=backend)
    with pytest.raises(ValueError, match="expects inputs"):
        short_convolution(x[0], past, weight, None, backend=backend)
