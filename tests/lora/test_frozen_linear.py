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


def doubled(base):
    plain = base.forward
    base.forward = lambda x: 2 * plain(x)


WAYS_TO_CHANGE_A_BASE = {
    "forward hook": lambda base: base.register_forward_hook(lambda module, args, y: 2 * y),
    "forward pre-hook": lambda base: base.register_forward_pre_hook(
        lambda module, args: 2 * args[0]
    ),
    "backward hook": lambda base: base.register_full_backward_hook(
        lambda module, d_in, d_out: (2 * d_in[0],)
    ),
    "replaced forward": doubled,
}


@pytest.mark.parametrize("change", WAYS_TO_CHANGE_A_BASE.values(), ids=WAYS_TO_CHANGE_A_BASE)
def test_what_changes_the_base_changes_its_gradient_and_not_the_updates(change):
    layer, x = build()
    grad = torch.randn(2, 5, 40)
    _, dx, dA, dB = run(layer, x, grad)
    change(layer.base_layer)
    _, changed, *others = run(layer, x, grad)
    weight = layer.base_layer.weight.detach()
    assert_close("dx", changed, dx + grad @ weight, max_rel=1e-5, rms_rel=1e-6)
    for name, one, other in zip(("dA", "dB"), others, (dA, dB), strict=True):
        assert_close(name, one, other, max_rel=1e-5, rms_rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_hook_of_the_base_sees_and_keeps_its_result_without_the_update(training):
    layer, x = build()
    seen = []
    layer.base_layer.register_forward_hook(lambda module, args, y: seen.append(y))
    with torch.set_grad_enabled(training):
        layer(x)
    assert torch.equal(seen[0], x @ layer.base_layer.weight.T)


def test_the_backward_pass_computes_in_its_own_dtype_under_autocast():
    layer, x = build()
    expected = run(layer, x, torch.ones(2, 5, 40))[1:]
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y.sum(), [x, *factors(layer)])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_activation_checkpointing_changes_no_bit():
    layer, x = build()
    grad = torch.randn(2, 5, 40)
    again = run(layer, x, grad, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(again, run(layer, x, grad), strict=True))


@pytest.mark.parametrize("case", ["bf16", "bias", "dropout", "trained base", "autocast", "bf16 B"])
def test_whatever_is_not_plain_takes_the_general_way(case):
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    layer, x = build(dtype, bias=case == "bias", dropout=0.5 if case == "dropout" else 0.0)
    layer.base_layer.weight.requires_grad_(case == "trained base")
    if case == "bf16 B":
        factors(layer)[1].data = factors(layer)[1].data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        y = layer(x)
    assert y.requires_grad and not summed_in_place(y)
    y.sum().backward()
    assert (layer.base_layer.weight.grad is not None) == (case == "trained base")
