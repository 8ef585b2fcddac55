"""The CPU kernels with several threads: no bit changes, nothing hangs, not even after a fork."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from cpu_cases import ISAS, needs_library, run_cpu
from moe_lora_cases import Case, build

pytestmark = needs_library

# enough work for several threads
CASE = Case(num_tokens=300, dim=256, hidden=192, num_experts=6, rank=8)


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def differences(actual, expected) -> list[str]:
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(isa, form, dtype, threads):
    operands = build(replace(CASE, form=form), dtype, torch.float32)
    threads(1)
    expected = run_cpu(operands, isa)
    for count in (2, 3, 8):
        threads(count)
        assert not differences(run_cpu(operands, isa), expected)


def test_run_to_run_no_bit_changes(threads):
    threads(2)
    operands = build(CASE, torch.bfloat16, torch.float32)
    expected = run_cpu(operands)
    for _ in range(5):
        assert not differences(run_cpu(operands), expected)


def test_python_threads_may_call_at_the_same_time(threads):
    threads(2)
    operands = [
        build(Case(**(vars(CASE) | {"seed": s})), torch.bfloat16, torch.float32) for s in range(4)
    ]
    expected = [run_cpu(o) for o in operands]
    found: list[list[str]] = [["did not end"] for _ in operands]

    def work(index: int) -> None:
        torch.set_num_threads(2)
        found[index] = [
            name
            for _ in range(5)
            for name in differences(run_cpu(operands[index]), expected[index])
        ]

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(operands))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert found == [[]] * len(operands)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_the_same(threads):
    threads(2)
    # work for two of our threads, but too little for a second one of torch, which would hang
    case = Case(num_tokens=100, dim=128, hidden=96, num_experts=6, rank=8)
    operands = build(case, torch.bfloat16, torch.float32)
    # the parent's threads exist now, and the child will not have them
    expected = run_cpu(operands)
    child = os.fork()
    if child == 0:
        # no way back into pytest from here
        status = 2
        try:
            status = int(bool(differences(run_cpu(operands), expected)))
        finally:
            os._exit(status)
    deadline = threading.Timer(60, os.kill, (child, 9))
    deadline.start()
    _, status = os.waitpid(child, 0)
    deadline.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
