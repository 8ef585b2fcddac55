"""Which backend an op takes, and what it says about it."""

import pytest
import torch

from k3tune_kernels import dispatch

OP = "moe_lora"


@pytest.fixture
def triton_op(monkeypatch):
    """An op whose Triton kernels take bf16 and fp32, outside the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(dispatch.TRITON_DTYPES, OP, (torch.bfloat16, torch.float32))


def test_cpu_tensors_take_the_reference_and_the_reason_says_so(triton_op):
    assert dispatch.choose(OP, "auto", torch.zeros(1)) == "reference"
    assert dispatch.explain(OP) == dispatch.Choice(
        "reference", "the tensors are on the CPU and TRITON_INTERPRET is unset"
    )


def test_asking_for_triton_where_it_cannot_run_is_an_error(triton_op):
    with pytest.raises(ValueError, match="on the CPU and TRITON_INTERPRET is unset"):
        dispatch.choose(OP, "triton", torch.zeros(1))


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"'auto', 'triton', 'reference'.*found 'cutlass'"):
        dispatch.choose(OP, "cutlass", torch.zeros(1))


def test_the_interpreter_counts_as_triton_for_cpu_tensors(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(OP, "auto", torch.zeros(1)) == "triton"
    assert dispatch.choose(OP, "triton", torch.zeros(1, dtype=torch.bfloat16)) == "triton"


def test_auto_never_lands_on_the_interpreters_wrong_bf16(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(OP, "auto", torch.zeros(1, dtype=torch.bfloat16)) == "reference"
    assert "bf16" in dispatch.explain(OP).reason


def test_fp64_belongs_to_the_reference(triton_op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(OP, "auto", torch.zeros(1, dtype=torch.float64)) == "reference"
    with pytest.raises(ValueError, match=r"found torch\.float64"):
        dispatch.choose(OP, "triton", torch.zeros(1, dtype=torch.float64))


def test_an_op_without_a_kernel_takes_the_reference():
    assert dispatch.choose("no_such_op", "auto", torch.zeros(1)) == "reference"
    with pytest.raises(ValueError, match="no Triton kernel"):
        dispatch.choose("no_such_op", "triton", torch.zeros(1))


def test_explain_lists_every_op_called(triton_op):
    dispatch.choose(OP, "reference", torch.zeros(1))
    assert dispatch.explain()[OP] == dispatch.Choice("reference", "asked for")
    assert dispatch.explain("never_called") is None
