"""The chunked loss with its Triton kernel in bf16, in the interpreter with real bf16."""

import torch

from closeness import assert_close, relative_l2
from linear_cross_entropy_cases import NAMES, exact, inputs, run


def test_bf16_is_no_worse_than_the_unfused_head():
    hidden, weight, targets, grad = inputs(100, 64, 1000, dtype=torch.bfloat16)
    logits = (hidden @ weight.T).float()
    unfused = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    plain = (unfused, *torch.autograd.grad(unfused, (hidden, weight), grad))
    for name, ours, theirs, expected in zip(
        NAMES,
        run(hidden, weight, targets, grad, backend="triton"),
        plain,
        exact(hidden, weight, targets, grad),
        strict=True,
    ):
        bound = 1.1 * relative_l2(theirs, expected)
        assert_close(name, ours, expected, max_rel=2e-2, rms_rel=bound)


def test_bf16_equals_the_reference():
    case = inputs(63, 24, 100, dtype=torch.bfloat16)
    for name, actual, expected in zip(NAMES, run(*case, backend="triton"), run(*case), strict=True):
        bound = 1e-6 if name == "nll" else 2e-3
        assert_close(name, actual, expected, max_rel=4 * bound, rms_rel=bound)
