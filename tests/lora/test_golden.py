"""Adapters of both forms reproduce the golden checkpoints: logits, loss and every gradient."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.lora import adapter_gradients, adapter_state, disable_adapter, load_adapter
from k3tune.model import load_base

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMS = {"k3_tiny": "per_expert", "k3_tiny_shared_outer": "shared_outer"}


@pytest.fixture(params=FORMS)
def golden(request):
    folder = FIXTURES / request.param
    model = load_base(folder, dtype=torch.float32, kernels="reference")
    return folder, load_adapter(model, folder / "adapter", trainable=True)


def test_logits_and_loss(golden):
    folder, model = golden
    expected = load_file(folder / "golden.safetensors")
    ids = expected["input_ids"]
    with torch.no_grad():
        output = model(ids, labels=ids, return_logits=True)
    assert (output.logits - expected["lora_logits"]).abs().max() <= 3e-4
    assert (output.loss - expected["lora_loss"]).abs() <= 1e-4


def test_every_gradient(golden):
    folder, model = golden
    ids = load_file(folder / "golden.safetensors")["input_ids"]
    expected = load_file(folder / "lora_grads.safetensors")
    model(ids, labels=ids).loss.backward()
    actual = adapter_gradients(model)
    assert actual.keys() == expected.keys()
    together = [
        torch.cat([grads[key].flatten() for key in expected]) for grads in (actual, expected)
    ]
    assert relative_l2(*together) <= 1e-3
    for key, gradient in expected.items():
        assert actual[key].shape == gradient.shape and actual[key].dtype == torch.float32
        if gradient.norm() > 1e-5:
            assert relative_l2(actual[key], gradient) <= 1e-2, key


def test_the_state_is_the_file(golden):
    folder, model = golden
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    state = adapter_state(model)
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[key], stored[key].float()) for key in stored)


def test_without_gradient_there_are_zeros(golden):
    _, model = golden
    gradients = adapter_gradients(model)
    assert gradients.keys() == adapter_state(model).keys()
    assert not any(gradient.any() for gradient in gradients.values())


def test_disabled_it_is_the_base(golden):
    folder, model = golden
    expected = load_file(folder / "golden.safetensors")
    ids = expected["input_ids"]
    base = load_base(folder, dtype=torch.float32, kernels="reference")
    with torch.no_grad(), disable_adapter(model):
        assert torch.equal(model(ids).logits, base(ids).logits)
