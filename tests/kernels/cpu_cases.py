"""What the tests of the CPU kernels share: running the op on one instruction set."""

from collections.abc import Callable, Sequence

import pytest
import torch

from closeness import relative_l2
from k3tune_kernels.cpu import library
from k3tune_kernels.moe_lora.cpu_op import moe_lora_cpu
from moe_lora_cases import SITU, Operands, differentiate

needs_library = pytest.mark.skipif(
    library.obstacle() is not None, reason=f"no CPU kernels: {library.obstacle()}"
)
ISAS = library.isas() if library.obstacle() is None else []


def forward_cpu(operands: Operands, isa: str | None = None) -> torch.Tensor:
    """The op's output on one instruction set."""
    return moe_lora_cpu(
        operands.x,
        operands.ids,
        operands.weights,
        *operands.packed,
        operands.lora,
        situ=SITU,
        local_experts=operands.local_experts,
        isa=isa,
    )


def run_cpu(operands: Operands, isa: str | None = None) -> dict[str, torch.Tensor]:
    """Output and every gradient on one instruction set, by name."""
    return differentiate(operands, operands.leaves, lambda: forward_cpu(operands, isa))


def assert_threads_change_no_bit(run: Callable[[], Sequence[torch.Tensor]]) -> None:
    """What ``run`` returns, from one seed, is equal on one thread, two and three."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def error(
    name: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], o: Operands
) -> float:
    """Relative L2; for a routing weight's gradient relative to the vectors it is a product of.

    That gradient is one dot product, which may cancel to any fraction of its terms.
    """
    found = relative_l2(actual[name], expected[name])
    if name != "weights" or not expected[name].any():
        return found
    size = (o.grad_out.double().norm(dim=1) * expected["out"].norm(dim=1)).norm()
    return found * min(1.0, (expected[name].norm() / size).item())
