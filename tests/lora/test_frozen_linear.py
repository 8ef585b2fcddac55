"""LoraLinear's training step with sums in place: the equation's gradients, and who may take it."""

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from k3tune.lora.layers import LoraLinear

NAMES = ("y", "dx", "dA", "dB")
SCALING = 2.0


def build(dtype=torch.float32, *, bias=False, dropout=0.0):
    """A layer from 24 to 40 with random factors of rank 4, and its input."""
    base = nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)
    config = LoraConfig(r=4, lora_dropout=dropout)
    layer = LoraLinear(base, "default", config, r=4, lora_alpha=4 * SCALING)
    with torch.no_grad():
        layer.factor("default", "B").normal_()
    return layer, torch.randn(2, 5, 24, dtype=dtype, requires_grad=True)


def factors(layer):
    return [layer.factor("default", half) for half in "AB"]


def summed_in_place(y):
    return type(y.grad_fn).__name__ == "FrozenLinearWithLoraBackward"


def run(layer, x, grad, forward=None):
    """Output and the gradients of x, A and B."""
    y = (forward or layer)(x)
    return y, *torch.autograd.grad(y, [x, *factors(layer)], grad)


def exact(layer, x, grad):
    """The same from the equation in fp64."""
    weight = layer.base_layer.weight.double()
    leaves = [t.detach().double().requires_grad_() for t in (x, *factors(layer))]
    x, A, B = leaves
    y = x @ (weight + SCALING * B @ A).T
    return y, *torch.autograd.grad(y, leaves, grad.double())


@pytest.mark.parametrize("shape", [(2, 5, 24), (7, 24), (24,), (0, 24)])
def test_output_and_gradients_are_those_of_the_equation(shape):
    layer, _ = build()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 40)
    actual = run(layer, x, grad)
    assert summed_in_place(actual[0])
    for name, one, other in zip(NAMES, actual, exact(layer, x, grad), strict=True):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


def test_strided_inputs_equal_their_copies():
    layer, x = build()
    grad = torch.randn(2, 40, 5).mT
    turned = x.detach().mT.contiguous().mT.requires_grad_()
    expected = run(layer, x, grad.contiguous())
    for name, one, other in zip(NAMES, run(layer, turned, grad), expected, strict=True):
        assert_close(name, one, other, max_rel=1e-6, rms_rel=1e-6)


def test_what_is_frozen_gets_no_gradient():
    layer, x = build()
    A, B = factors(layer)
    layer(x.detach()).sum().backward()
    assert A.grad is not None and B.grad is not None and layer.base_layer.weight.grad is None
    A.requires_grad_(False)
    A.grad = B.grad = None
    layer(x).sum().backward()
    assert A.grad is None and B.grad is not None and x.grad is not None


def test_kept_are_the_input_and_its_narrow_product():
    layer, x = build()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    weights = [t.data_ptr() for t in (layer.base_layer.weight, *factors(layer))]
    shapes = [tuple(t.shape) for t in kept if t.data_ptr() not in weights]
    assert shapes == [(2, 5, 24), (10, 4)]


def test_hooks_of_the_base_are_called():
    layer, x = build()
    seen = []
    layer.base_layer.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    layer(x)
    assert seen == [(2, 5, 40)]


def test_activation_checkpointing_changes_no_bit():
    layer, x = build()
    grad = torch.randn(2, 5, 40)
    again = run(layer, x, grad, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(again, run(layer, x, grad), strict=True))


@pytest.mark.parametrize("case", ["bf16", "bias", "dropout", "trained base", "autocast"])
def test_whatever_is_not_plain_takes_the_general_way(case):
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    layer, x = build(dtype, bias=case == "bias", dropout=0.5 if case == "dropout" else 0.0)
    layer.base_layer.weight.requires_grad_(case == "trained base")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        y = layer(x)
    assert y.requires_grad and not summed_in_place(y)
    y.sum().backward()
    assert (layer.base_layer.weight.grad is not None) == (case == "trained base")
