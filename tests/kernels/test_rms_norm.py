"""RMSNorm, plain and gated: the equation in fp64, every gradient, and where it is rounded."""

import pytest
import torch

from closeness import assert_close
from cpu_cases import ISAS, assert_threads_change_no_bit, needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.rms_norm import cpu_op, gated_rms_norm, reference, rms_norm

EPS = 1e-5
ON_EACH = pytest.mark.parametrize("isa", ISAS)
SHAPES = pytest.mark.parametrize("shape", [(5, 64), (2, 3, 63), (700, 16), (3, 1000), (0, 32)])
NAMES = ("out", "dx", "d_weight", "d_gate")


def operands(shape, dtype=torch.float32, *, gated=False):
    """Leaves (x, weight and, gated, the gate) and a gradient."""
    x = 2 * torch.randn(shape) + 0.5
    leaves = [x, 1 + 0.3 * torch.randn(shape[-1]), *([3 * torch.randn(shape)] if gated else [])]
    return [leaf.to(dtype).requires_grad_() for leaf in leaves], torch.randn(shape).to(dtype)


def run(leaves, grad, backend):
    """The op's output and the gradients of its leaves."""
    op = gated_rms_norm if len(leaves) == 3 else rms_norm
    out = op(*leaves, eps=EPS, backend=backend)
    return out, *torch.autograd.grad(out, leaves, grad)


def run_native(isa, leaves, grad):
    """The same on one instruction set."""
    x, weight, gate = (*(leaf.detach() for leaf in leaves), None)[:3]
    out = cpu_op.forward(x, weight, gate, EPS, isa=isa)
    gradients = cpu_op.backward(grad, x, weight, gate, EPS, needs_weight=True, isa=isa)
    return out, *gradients[: len(leaves)]


def exact(leaves, grad):
    """The same from the equation as written, by autograd in fp64."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x, weight, *gate = leaves
    out = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    for values in gate:
        out = out * torch.sigmoid(values)
    return out, *torch.autograd.grad(out, leaves, grad.double())


@SHAPES
@pytest.mark.parametrize("gated", [False, True])
def test_the_reference_is_the_equation(shape, gated):
    leaves, grad = operands(shape, torch.float64, gated=gated)
    results = zip(NAMES, run(leaves, grad, "reference"), exact(leaves, grad), strict=False)
    for name, one, other in results:
        assert_close(name, one, other, max_rel=1e-12, rms_rel=1e-12)


@needs_library
@ON_EACH
@SHAPES
@pytest.mark.parametrize("gated", [False, True])
def test_fp32_is_within_1e_6_of_fp64(isa, shape, gated):
    leaves, grad = operands(shape, gated=gated)
    results = zip(NAMES, run_native(isa, leaves, grad), exact(leaves, grad), strict=False)
    for name, one, other in results:
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


@needs_library
@ON_EACH
@SHAPES
def test_bf16_is_rounded_where_the_reference_rounds(isa, shape):
    leaves, grad = operands(shape, torch.bfloat16)
    out, *gradients = run_native(isa, leaves, grad)
    wanted, *exact_gradients = exact(leaves, grad)
    # twice: once normalised and once weighted
    assert_close("out", out, wanted, max_rel=6e-3, rms_rel=3e-3)
    if out.numel():
        differing = (out != reference.rms_norm(*leaves, EPS)).float().mean().item()
        # the root mean square may differ in its last bit
        assert differing < 0.01, f"{differing=}"
    for name, one, other in zip(NAMES[1:], gradients, exact_gradients, strict=False):
        assert one.dtype is torch.bfloat16
        assert_close(name, one, other, max_rel=4e-3, rms_rel=4e-3)


@needs_library
@pytest.mark.parametrize("gated", [False, True])
def test_autograd_gives_what_the_reference_gives(gated):
    leaves, grad = operands((4, 9, 48), gated=gated)
    actual = run(leaves, grad, "cpu")
    assert dispatch.explain("gated_rms_norm" if gated else "rms_norm").backend == "cpu"
    for name, one, other in zip(NAMES, actual, run(leaves, grad, "reference"), strict=False):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


@needs_library
def test_a_token_of_zeros_has_a_finite_gradient():
    (x, weight), grad = operands((3, 32))
    x.data[1] = 0
    for name, one, other in zip(
        NAMES, run([x, weight], grad, "cpu"), exact([x, weight], grad), strict=False
    ):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


@needs_library
@pytest.mark.parametrize("gated", [False, True])
def test_strided_operands_equal_their_copies(gated):
    leaves, grad = operands((6, 40), gated=gated)
    expected = run(leaves, grad, "cpu")
    apart = [torch.stack([leaf.detach()] * 2, -1)[..., 0].requires_grad_() for leaf in leaves]
    actual = run(apart, torch.stack([grad] * 2, -1)[..., 0], "cpu")
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@needs_library
def test_a_frozen_weight_gets_no_gradient():
    (x, weight), grad = operands((6, 40))
    _, dx, _ = run([x, weight], grad, "cpu")
    weight.requires_grad_(False)
    rms_norm(x, weight, eps=EPS, backend="cpu").backward(grad)
    assert weight.grad is None and torch.equal(x.grad, dx)


@needs_library
@pytest.mark.parametrize("gated", [False, True])
def test_the_number_of_threads_changes_no_bit(gated):
    assert_threads_change_no_bit(lambda: run(*operands((3, 700, 64), gated=gated), "cpu"))


@needs_library
def test_other_dtypes_are_the_references():
    (x, weight, gate), _ = operands((2, 16), gated=True)
    for backend in ("auto", "cpu"):
        out = rms_norm(x.bfloat16(), weight, eps=EPS, backend=backend)
        assert out.dtype is torch.float32
        assert "takes one dtype, found" in dispatch.explain("rms_norm").reason
        out = gated_rms_norm(x, weight, gate.bfloat16(), eps=EPS, backend=backend)
        assert out.dtype is torch.bfloat16
        assert "takes one dtype, found" in dispatch.explain("gated_rms_norm").reason
        rms_norm(x.double(), weight.double(), eps=EPS, backend=backend)
        assert "found torch.float64" in dispatch.explain("rms_norm").reason


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_shapes_that_do_not_fit_are_an_error(backend):
    x = torch.ones(4, 64)
    for weight in (torch.ones(1), torch.ones(32), torch.ones(4, 64)):
        with pytest.raises(ValueError, match=r"a weight of shape \(64,\), got"):
            rms_norm(x, weight, eps=EPS, backend=backend)
    for gate in (torch.zeros(64), torch.zeros(4, 1)):
        with pytest.raises(ValueError, match=r"a gate of shape \(4, 64\), got"):
            gated_rms_norm(x, torch.ones(64), gate, eps=EPS, backend=backend)
    with pytest.raises(ValueError, match="expects x"):
        rms_norm(torch.ones(()), torch.ones(()), eps=EPS, backend=backend)
