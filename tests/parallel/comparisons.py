"""A spread run of ``expert_cases`` held against one process's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import Case, shards_of
from safetensors.torch import load_file
from torch import Tensor

from closeness import relative_l2
from k3tune.lora import adapter_state

ADAPTER_BOUND = {"sgd": 1e-6, "adamw": 1e-4}


def facts(folder: Path, case: Case, rank: int = 0) -> dict[str, Any]:
    """What a process noted beside tensors."""
    return json.loads((folder / f"{case.name}.json-{rank}").read_text())


def gradients(
    folder: Path, case: Case, expected: dict[str, Any], size: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """First gradients of all ranks, name by name, each beside one process's."""
    num_experts = expected["model"].get_base_model().model.architecture.num_experts
    shards = shards_of(case, num_experts, size)
    for rank in range(world):
        found = load_file(folder / f"{case.name}.gradients-{rank}")
        assert found.keys() == expected["gradients"].keys()
        for name, whole in expected["gradients"].items():
            part = whole
            if found[name].shape != whole.shape:
                part = whole[list(shards.experts(rank % size, int(name.split(".")[2])))]
            yield found[name], part


def adapters(folder: Path, case: Case, expected: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The trained adapter, tensor by tensor, each beside one process's."""
    trained = load_file(folder / f"{case.name}.adapter" / "adapter_model.safetensors")
    state = adapter_state(expected["model"])
    assert trained.keys() == state.keys()
    return [(trained[key], state[key]) for key in state]


def relative_l2_of_all(pairs) -> float:
    """Of all tensors as one."""
    actual, expected = zip(*pairs, strict=True)
    return relative_l2(*(torch.cat([t.flatten() for t in ts]) for ts in (actual, expected)))


def check_run(
    folder: Path,
    case: Case,
    expected: dict[str, Any],
    size: int,
    world: int,
    loss_noise: float = 0.0,
    gradient_bound: float = 2e-6,
) -> None:
    """Five losses, the first step's gradients and the trained adapter.

    Args:
        folder, case: of the run.
        expected: one process's.
        size, world: ranks that share experts, and all.
        loss_noise: what a loss may be off by that is near 0, as a sum of parts that cancel.
        gradient_bound: of all first gradients together.
    """
    losses = facts(folder, case)["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-5, abs=loss_noise)
    first = relative_l2_of_all(gradients(folder, case, expected, size, world))
    last = relative_l2_of_all(adapters(folder, case, expected))
    print(f"{case.name}: gradients {first:.1e}, adapter {last:.1e}")
    assert first <= gradient_bound
    assert last <= ADAPTER_BOUND[case.optimizer]


def check_exact_run(
    folder: Path, case: Case, expected: dict[str, Any], size: int, world: int
) -> None:
    """The same tensor by tensor, for a case without the noise of fp32."""
    assert facts(folder, case)["losses"] == pytest.approx(expected["losses"], rel=1e-7)
    first = max(relative_l2(*pair) for pair in gradients(folder, case, expected, size, world))
    last = max(relative_l2(*pair) for pair in adapters(folder, case, expected))
    print(f"{case.name}: gradients {first:.1e}, adapter {last:.1e}")
    assert first <= 1e-6
    assert last <= 1e-6
