"""Which backend an op takes, and what it says about it."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from k3tune_kernels import dispatch
from k3tune_kernels.cpu import library
from k3tune_kernels.rms_norm import rms_norm

OP = "moe_lora"


@pytest.fixture
def triton_op(monkeypatch):
    """An op whose Triton kernels take bf16 and fp32, outside the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(dispatch.TRITON_DTYPES, OP, (torch.bfloat16, torch.float32))


@pytest.fixture
def cpu_kernels(monkeypatch):
    """Pretends that the library is there, or is not for the reason given."""

    def pretend(obstacle=None):
        monkeypatch.setattr(library, "obstacle", lambda: obstacle)
        dispatch._warn_once.cache_clear()

    pretend()
    return pretend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_tensors_take_the_native_kernels(triton_op, cpu_kernels, dtype):
    assert dispatch.choose(OP, "auto", torch.zeros(1, dtype=dtype)) == "cpu"
    assert dispatch.explain(OP) == dispatch.Choice("cpu", "can run here")
    assert dispatch.choose(OP, "cpu", torch.zeros(1, dtype=dtype)) == "cpu"


def test_without_the_library_cpu_tensors_take_the_reference_with_one_warning(
    triton_op, cpu_kernels, recwarn
):
    cpu_kernels("it was not built")
    for _ in range(3):
        assert dispatch.choose(OP, "auto", torch.zeros(1)) == "reference"
    assert dispatch.explain(OP) == dispatch.Choice("reference", "it was not built")
    [warning] = recwarn
    assert "the slower reference runs: it was not built" in str(warning.message)
    with pytest.raises(ValueError, match="'cpu' was asked for, but it was not built; use 'auto'"):
        dispatch.choose(OP, "cpu", torch.zeros(1))


def test_asking_for_cpu_takes_the_reference_of_ops_without_native_kernels(triton_op):
    assert dispatch.choose("linear_cross_entropy", "cpu", torch.zeros(1)) == "reference"
    assert dispatch.choose("linear_cross_entropy", "auto", torch.zeros(1)) == "reference"
    assert dispatch.explain("linear_cross_entropy").reason == (
        "the tensors are on the CPU and TRITON_INTERPRET is unset"
    )


def test_the_native_kernels_are_for_cpu_tensors(triton_op, cpu_kernels):
    with pytest.raises(ValueError, match="the tensors are on meta"):
        dispatch.choose(OP, "cpu", torch.zeros(1, device="meta"))


def test_asking_for_triton_where_it_cannot_run_is_an_error(triton_op):
    with pytest.raises(ValueError, match="on the CPU and TRITON_INTERPRET is unset"):
        dispatch.choose(OP, "triton", torch.zeros(1))


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"'auto', 'triton', 'cpu', 'reference'.*found 'cutlass'"):
        dispatch.choose(OP, "cutlass", torch.zeros(1))


def test_the_interpreter_counts_as_triton_for_cpu_tensors(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(OP, "auto", torch.zeros(1)) == "triton"
    assert dispatch.choose(OP, "triton", torch.zeros(1, dtype=torch.bfloat16)) == "triton"


def test_auto_never_lands_on_the_interpreters_wrong_bf16(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op = "linear_cross_entropy"
    assert dispatch.choose(op, "auto", torch.zeros(1, dtype=torch.bfloat16)) == "reference"
    assert "bf16" in dispatch.explain(op).reason


def test_fp64_belongs_to_the_reference(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(OP, "auto", torch.zeros(1, dtype=torch.float64)) == "reference"
    with pytest.raises(ValueError, match=r"found torch\.float64"):
        dispatch.choose(OP, "triton", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"its CPU kernel takes .* found torch\.float64"):
        dispatch.choose(OP, "cpu", torch.zeros(1, dtype=torch.float64))


def test_an_op_without_a_kernel_takes_the_reference():
    assert dispatch.choose("no_such_op", "auto", torch.zeros(1)) == "reference"
    with pytest.raises(ValueError, match="no Triton kernel"):
        dispatch.choose("no_such_op", "triton", torch.zeros(1))


def test_explain_lists_every_op_called(triton_op):
    dispatch.choose(OP, "reference", torch.zeros(1))
    assert dispatch.explain()[OP] == dispatch.Choice("reference", "asked for")
    assert dispatch.explain("never_called") is None


def test_tensors_without_memory_are_never_read_natively(cpu_kernels):
    with FakeTensorMode():
        fake = torch.ones(4, 64)
        assert rms_norm(fake, torch.ones(64), eps=1e-5).shape == (4, 64)
    assert "whose memory it cannot read" in dispatch.explain("rms_norm").reason
