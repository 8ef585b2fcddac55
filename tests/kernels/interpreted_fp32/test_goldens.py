"""The golden checkpoints and their adapters, through every Triton kernel of the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import k3tune
from closeness import relative_l2
from k3tune.lora import adapter_gradients
from k3tune_kernels import dispatch

FIXTURES = Path(__file__).parents[2] / "fixtures"
OPS = ("moe_lora", "situ_glu", "attention_residual", "linear_cross_entropy")


@torch.no_grad()
def test_the_base_is_the_golden():
    golden = load_file(FIXTURES / "k3_tiny_shared_outer" / "golden.safetensors")
    model = k3tune.load_base(
        FIXTURES / "k3_tiny_shared_outer", dtype=torch.float32, kernels="triton"
    )
    # of the first tokens: the later ones change nothing before them
    logits = model(golden["input_ids"][:1, :3]).logits
    assert (logits - golden["logits"][:1, :3]).abs().max() <= 3e-4
    assert dispatch.explain("moe_lora").backend == "triton"


@pytest.fixture(scope="module", params=["k3_tiny", "k3_tiny_shared_outer"])
def folder(request: pytest.FixtureRequest) -> Path:
    return FIXTURES / request.param


@pytest.mark.slow
def test_the_adapted_model_and_its_gradients_are_the_goldens(folder):
    golden = load_file(folder / "golden.safetensors")
    ids = golden["input_ids"]
    base = k3tune.load_base(folder, dtype=torch.float32, kernels="triton")
    with torch.no_grad():
        output = base(ids, labels=ids, return_logits=True)
    assert (output.logits - golden["logits"]).abs().max() <= 3e-4
    assert (output.loss - golden["base_loss"]).abs() <= 1e-4
    model = k3tune.load_adapter(base, folder / "adapter", trainable=True)
    output = model(input_ids=ids, labels=ids, return_logits=True)
    assert (output.logits - golden["lora_logits"]).abs().max() <= 3e-4
    assert (output.loss - golden["lora_loss"]).abs() <= 1e-4
    output.loss.backward()
    assert {op: dispatch.explain(op).backend for op in OPS} == dict.fromkeys(OPS, "triton")
    expected = load_file(folder / "lora_grads.safetensors")
    actual = adapter_gradients(model)
    assert actual.keys() == expected.keys()
    names = sorted(expected)
    together = [torch.cat([d[name].flatten() for name in names]) for d in (actual, expected)]
    assert relative_l2(*together) <= 1e-3
    for name in names:
        if expected[name].norm() > 1e-5:
            assert relative_l2(actual[name], expected[name]) <= 1e-2, name
