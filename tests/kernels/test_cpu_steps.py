"""The small native kernels (mixer, SiTU-GLU, KDA step): every instruction set against fp64."""

import pytest
import torch

from closeness import assert_close
from cpu_cases import ISAS, assert_threads_change_no_bit, needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.attention_residual import attention_residual
from k3tune_kernels.attention_residual import cpu_kernels as cpu_mixer
from k3tune_kernels.attention_residual import reference as mixer
from k3tune_kernels.kda_step import KdaConstants, KdaInputs, kda_step
from k3tune_kernels.kda_step import reference as step
from k3tune_kernels.kda_step.cpu_op import kda_step_cpu
from k3tune_kernels.situ_glu import cpu_kernels as cpu_situ
from k3tune_kernels.situ_glu import reference as situ
from k3tune_kernels.situ_glu import situ_glu

pytestmark = needs_library
ON_EACH = pytest.mark.parametrize("isa", ISAS)


def wide(values):
    """Tensors in fp64, the rest as it is."""
    return [v.double() if isinstance(v, torch.Tensor) else v for v in values]


ON_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ON_MIXES = pytest.mark.parametrize(
    "shape", [(1, 5, 16), (3, 64, 192), (9, 7, 63), (12, 3, 1000), (2, 0, 32)]
)


def mix_operands(shape, dtype):
    """Sources of growing size, and a norm and a query that give scores of about 2."""
    num_sources, *rest = shape
    sources = [(torch.randn(rest) * (1 + i)).to(dtype) for i in range(num_sources)]
    norm, query = 1 + 0.3 * torch.randn(rest[-1]), 2 * torch.randn(rest[-1]) / rest[-1] ** 0.5
    return sources, norm, query


@ON_EACH
@ON_DTYPES
@ON_MIXES
def test_the_mix_its_weights_and_root_mean_squares(isa, dtype, shape):
    sources, norm, query = mix_operands(shape, dtype)
    actual = cpu_mixer.forward(sources, norm, query, 1e-5, isa=isa)
    expected = mixer.forward(wide(sources), norm.double(), query.double(), 1e-5)
    bound = 1e-6 if dtype is torch.float32 else 4e-3
    assert actual[0].dtype == dtype
    assert_close("mix", actual[0], expected[0], max_rel=bound, rms_rel=bound)
    for name, one, other in zip(("weights", "rms"), actual[1:], expected[1:], strict=True):
        assert_close(name, one, other, max_rel=2e-6, rms_rel=1e-6)


@ON_EACH
@ON_DTYPES
@ON_MIXES
@pytest.mark.parametrize("sum_weights", [True, False])
def test_gradients_of_the_mix(isa, dtype, shape, sum_weights):
    sources, norm, query = mix_operands(shape, dtype)
    exact = wide(sources), norm.double(), query.double()
    _, *kept = mixer.forward(*exact, 1e-5)
    grad = torch.randn(shape[1:]).to(dtype)
    narrow = [value.float() for value in kept]
    options = {"sum_weights": sum_weights}
    actual, d_query = cpu_mixer.backward(grad, sources, norm, query, *narrow, **options, isa=isa)
    expected, wanted = mixer.backward(grad.double(), *exact, *kept, **options)
    bound = 2e-6 if dtype is torch.float32 else 4e-3
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        assert_close("d_source", one, other, max_rel=bound, rms_rel=bound)
    # one source: the weight is 1 whatever its score
    if sum_weights and shape[0] > 1:
        assert_close("d_query", d_query, wanted, max_rel=2e-6, rms_rel=2e-6)
    assert (d_query is None) != sum_weights


def test_strided_operands_of_the_mix_equal_their_copies():
    sources, norm, query = mix_operands((3, 5, 40), torch.float32)
    kept, grad = cpu_mixer.forward(sources, norm, query, 1e-5)[1:], torch.randn(5, 40)
    plain = cpu_mixer.backward(grad, sources, norm, query, *kept, sum_weights=True)
    strided = [x.T.contiguous().T for x in (grad, *sources)]
    other = cpu_mixer.backward(strided[0], strided[1:], norm, query, *kept, sum_weights=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True))
    assert torch.equal(plain[1], other[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_mix_of_what_is_not_finite_is_not(bad):
    sources = [torch.ones(2, 32), torch.full((2, 32), bad)]
    out = attention_residual(sources, torch.ones(32), torch.ones(32), eps=1e-5, backend="cpu")
    assert out.isnan().all()


@ON_EACH
@pytest.mark.parametrize("size", [32, 4096, 3 * 4096 + 64])
def test_situ_glu_and_its_gradients(isa, size):
    gate, up, grad = 4 * torch.randn(size), 30 * torch.randn(size), torch.randn(size)
    out = cpu_situ.forward(gate, up, 4.0, 25.0, isa=isa)
    expected = situ.forward(gate.double(), up.double(), 4.0, 25.0)
    assert_close("out", out, expected, max_rel=1e-6, rms_rel=1e-6)
    gradients = cpu_situ.backward(grad, gate, up, 4.0, 25.0, isa=isa)
    wanted = situ.backward(grad.double(), gate.double(), up.double(), 4.0, 25.0)
    for name, one, other in zip(("d_gate", "d_up"), gradients, wanted, strict=True):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


@pytest.mark.parametrize("op", ["mix", "situ"])
def test_gradients_are_those_of_the_reference(op):
    def run(backend):
        torch.manual_seed(3)
        leaves = [torch.randn(5, 64, requires_grad=True) for _ in range(2)]
        if op == "situ":
            out = situ_glu(*leaves, beta=4.0, linear_beta=25.0, backend=backend)
        else:
            # scores of about 2: a saturated softmax has gradients that cancel to any fraction
            weights = [(scale * torch.randn(64)).requires_grad_() for scale in (1.0, 0.25)]
            out = attention_residual(leaves, *weights, eps=1e-5, backend=backend)
            leaves = [*leaves, *weights]
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(5, 64))]

    for one, other in zip(run("cpu"), run("reference"), strict=True):
        assert_close(op, one, other, max_rel=2e-6, rms_rel=2e-6)


def test_what_the_small_kernels_do_not_take_is_the_references(recwarn):
    odd = torch.randn(3, 5)
    for backend in ("auto", "cpu"):
        situ_glu(odd, odd, beta=4.0, linear_beta=25.0, backend=backend)
        assert dispatch.explain("situ_glu").reason.endswith("a multiple of 32 values, found 15")
        situ_glu(odd.bfloat16(), odd.bfloat16(), beta=4.0, linear_beta=25.0, backend=backend)
        assert dispatch.explain("situ_glu").backend == "reference"
    assert not recwarn.list


def step_operands(rows: int, heads: int, dim: int):
    """Projections, constants, window and state of one step."""
    width = heads * dim
    inputs = KdaInputs(
        *(torch.randn(rows, width) for _ in range(3)),
        3 * torch.randn(rows, width),
        torch.randn(rows, heads),
        torch.randn(rows, width),
    )
    constants = KdaConstants(
        0.5 * torch.randn(4, 3 * width),
        0.5 + torch.rand(heads),
        torch.randn(width) - 1,
        1 + 0.1 * torch.randn(dim),
        gate_lower_bound=-5.0,
        eps=1e-5,
        unit_eps=1e-6,
    )
    return inputs, constants, torch.randn(rows, 3, 3 * width), torch.randn(rows, heads, dim, dim)


@ON_EACH
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(64, 6, 32), (1, 2, 16), (5, 3, 48), (2, 2, 128)]
)
def test_the_kda_step_moves_window_and_state_on(isa, rows, heads, dim):
    inputs, constants, window, state = step_operands(rows, heads, dim)
    wide_window, wide_state = window.double(), state.double()
    for _ in range(3):
        out = kda_step_cpu(inputs, constants, window, state, isa=isa)
        exact = KdaInputs(*wide(inputs)), KdaConstants(*wide(constants))
        expected = step.kda_step(*exact, wide_window, wide_state)
        assert_close("out", out, expected, max_rel=2e-6, rms_rel=1e-6)
        assert_close("state", state, wide_state, max_rel=2e-6, rms_rel=1e-6)
        assert torch.equal(window.double(), wide_window)
        inputs = KdaInputs(*(torch.randn_like(x) for x in inputs))


def test_no_rows_are_no_problem():
    inputs, constants, window, state = step_operands(0, 2, 16)
    assert kda_step(inputs, constants, window, state, backend="cpu").shape == (0, 32)


def test_the_number_of_threads_changes_no_bit():
    def run():
        inputs, constants, window, state = step_operands(70, 4, 32)
        sources, *weights = mix_operands((3, 700, 64), torch.float32)
        leaves = [x.requires_grad_() for x in (*sources, *weights)]
        mix = attention_residual(leaves[:3], *leaves[3:], eps=1e-5, backend="cpu")
        gradients = torch.autograd.grad(mix, leaves, torch.randn(700, 64))
        return kda_step(inputs, constants, window, state), window, state, mix, *gradients

    assert_threads_change_no_bit(run)


def test_other_widths_and_dtypes_of_the_step_are_the_references():
    inputs, constants, window, state = step_operands(2, 2, 12)
    kda_step(inputs, constants, window, state, backend="cpu")
    assert "heads of a multiple of 16" in dispatch.explain("kda_step").reason
    inputs, constants, window, state = step_operands(2, 2, 16)
    narrow = KdaInputs(*(x.bfloat16() for x in inputs))
    out = kda_step(narrow, constants, window.bfloat16(), state.clone())
    assert out.dtype == torch.bfloat16 and dispatch.explain("kda_step").backend == "reference"
    exact = kda_step(inputs, constants, window, state)
    assert_close("bf16", out, exact, max_rel=5e-2, rms_rel=2e-2)
