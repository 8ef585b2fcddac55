"""GRPO over four processes, in one group that shares experts, in two, or in none. Slow tier."""

from itertools import chain
from pathlib import Path

import pytest
from comparisons import check_run, facts, relative_l2_of_all
from grpo_runs import CASES, EXACT_CASES, IDLE_EXPERTS, make_folder, run
from ranks import run_ranks

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("grpo_cases.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process's runs by case."""
    folder = make_folder(tmp_path_factory.mktemp("grpo"))
    return folder, {case.name: run(folder, case, 1, 1) for case in (*CASES, *EXACT_CASES)}


def test_a_case_has_experts_without_any_token(alone):
    _, runs = alone
    for case in CASES:
        factors = {n: g for n, g in runs[case.name]["gradients"].items() if ".experts.w1" in n}
        # the half of which every expert has its own in both forms
        for name in (name for name in factors if "lora_B" in name):
            moved = factors[name].flatten(1).any(1)
            assert moved[: IDLE_EXPERTS[0]].all(), name
            assert moved[list(IDLE_EXPERTS)].any() == (case.routing == "natural"), name


def rounding(runs, case):
    """How far fp32 moves one process's first gradients."""
    narrow, wide = (runs[name]["gradients"] for name in (case.name, f"exact_{case.name}"))
    return relative_l2_of_all([(narrow[name], wide[name]) for name in narrow])


@pytest.mark.parametrize(("size", "zero_stage"), [(1, 2), (2, 1), (4, 2)])
def test_four_processes_train_as_one_does(alone, size, zero_stage):
    """Size 2 holds every expert twice, size 1 four times."""
    folder, expected = alone
    run_ranks(WORKER, 4, folder, size, zero_stage=zero_stage)
    for case in (*CASES, *EXACT_CASES):
        # two runs in fp32, each as far from the exact one
        bound = 2e-6 if case in EXACT_CASES else 2 * rounding(expected, case)
        # advantages are of order 1, and those of a prompt's samples cancel
        check_run(folder, case, expected[case.name], size, 4, loss_noise=1e-6, gradient_bound=bound)
        lengths = [facts(folder, case, rank)["lengths"] for rank in range(4)]
        drawn = [sum(map(sum, steps)) for steps in lengths]
        assert len(set(drawn)) > 1, drawn
        # of each step's eight samples two a process
        together = [[*chain(*step)] for step in zip(*lengths, strict=True)]
        assert together == expected[case.name]["lengths"]
