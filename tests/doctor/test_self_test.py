"""The self-test passes where the arithmetic is right and fails where it is not."""

import pytest
import torch

from k3tune.doctor import self_test
from k3tune.doctor.self_test import torch_finding
from k3tune_kernels import dispatch

moe_lora, decode = self_test.moe_lora, self_test.decode


@pytest.fixture
def path():
    """The path that moe_lora takes here."""
    list(self_test.self_test("cpu"))
    return dispatch.explain("moe_lora").backend


def test_this_machine_computes_rightly(path):
    found = list(self_test.self_test(path))
    assert [finding.level for finding in found] == ["ok"] * len(found)
    assert len(found) >= 2
    errors = found[1].facts["relative_l2"]
    assert set(errors) >= {"output", "dx", "dweights", "dA gate", "dB down"}
    assert all(0 <= error < found[1].facts["bound"] for error in errors.values())


def test_a_path_that_was_not_expected_is_a_warning(path):
    *_, finding = self_test.self_test("triton" if path != "triton" else "cpu")
    assert (finding.topic, finding.level) == ("experts", "warning")
    assert finding.facts["path"] == path


def test_a_wrong_decode_is_a_failure(monkeypatch):
    def off(packed, scale, dtype):
        values = decode(packed, scale, dtype)
        values[100, 2] *= 2
        return values

    monkeypatch.setattr(self_test, "decode", off)
    first = next(self_test.self_test("cpu"))
    assert first.level == "failure" and "1 of 130560 values are wrong" in first.text


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.05 * grad


@pytest.mark.parametrize("kind", ["output", "gradient", "nan"])
def test_a_wrong_output_or_gradient_is_a_failure(monkeypatch, kind):
    def off(*operands, backend, **options):
        out = moe_lora(*operands, backend=backend, **options)
        if backend == "reference":
            return out
        return {
            "output": lambda: out * 1.05,
            "gradient": lambda: _ScaledGradient.apply(out),
            "nan": lambda: out * float("nan"),
        }[kind]()

    monkeypatch.setattr(self_test, "moe_lora", off)
    found = list(self_test.self_test("cpu"))
    assert found[1].level == found[2].level == "failure"
    assert "off by" in found[1].text and found[1].next_step


def test_a_kernel_that_crashes_is_a_failure_that_quotes_it(monkeypatch):
    def crash(*operands, backend, **options):
        if backend == "reference":
            return moe_lora(*operands, backend=backend, **options)
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(self_test, "moe_lora", crash)
    finding = list(self_test.self_test("cpu"))[1]
    assert finding.level == "failure"
    assert "RuntimeError: no kernel image is available" in finding.text


@pytest.mark.parametrize(
    ("cuda", "seen", "drivers", "level"),
    [
        (None, 0, 0, "ok"),
        (None, 0, 8, "failure"),
        ("13.0", 8, 8, "ok"),
        ("13.0", 0, 8, "failure"),
    ],
)
def test_torch_must_reach_the_gpus_that_the_drivers_show(monkeypatch, cuda, seen, drivers, level):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    finding = torch_finding(drivers)
    assert finding.level == level and bool(finding.next_step) == (level != "ok")
