"""Every kernel compiles ahead of time for GPUs that are not here: no spills, memory within limits.

The default tier holds a large and a small configuration of each kernel on one NVIDIA and one AMD
architecture; ``slow`` holds every configuration on all.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context

import pytest

from k3tune_kernels.ahead_of_time import (
    COMPILED_OPS,
    SHARED_LIMIT_BYTES,
    TARGETS,
    Compiled,
    Specialization,
    compile_named,
    specializations,
)

DEFAULT_TARGETS = ("sm_90", "gfx950")
# Where matrix products of large tiles must go through these.
NEWEST_INSTRUCTION = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="an interpreting process cannot compile"
)


def kernel_of(specialization: Specialization) -> str:
    return specialization.name.split()[0]


def one_large_and_one_small(op: str, target: str) -> list[Specialization]:
    chosen = []
    for _, group in groupby(sorted(specializations(op, target), key=kernel_of), kernel_of):
        listed = list(group)
        large = [each for each in listed if each.large]
        small = [each for each in listed if not each.large]
        chosen += [small[0], large[0]] if large else [listed[0], *listed[1:][-1:]]
    return chosen


DEFAULT = [
    (op, target, each)
    for op in COMPILED_OPS
    for target in DEFAULT_TARGETS
    for each in one_large_and_one_small(op, target)
]
REST = [
    (op, target, each)
    for op in COMPILED_OPS
    for target in TARGETS
    for each in specializations(op, target)
    if (op, target, each.name) not in {(o, t, e.name) for o, t, e in DEFAULT}
]


@pytest.fixture(scope="module")
def compiling(request) -> Iterator[dict[tuple[str, str, str], Future[Compiled]]]:
    """Compilation of everything that was selected, under way on two cores."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and item.fixturenames.count("case")
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield {
            (op, target, each.name): pool.submit(compile_named, op, target, each.name)
            for op, target, each in selected
        }
        pool.shutdown(cancel_futures=True)


def label(case: tuple[str, str, Specialization]) -> str:
    return f"{case[1]} {case[2].name}"


def assert_compiled(case, compiling):
    op, target, specialization = case
    compiled = compiling[op, target, specialization.name].result()
    print(f"{label(case)}: {compiled}")
    assert compiled.shared_bytes <= SHARED_LIMIT_BYTES[target]
    assert compiled.spilled_bytes == 0
    if specialization.large and target in NEWEST_INSTRUCTION:
        assert NEWEST_INSTRUCTION[target] in compiled.matrix_instructions


@pytest.mark.parametrize("case", DEFAULT, ids=label)
def test_compiles(case, compiling):
    assert_compiled(case, compiling)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=label)
def test_compiles_in_every_configuration(case, compiling):
    assert_compiled(case, compiling)


def test_every_op_with_kernels_is_compiled():
    from k3tune_kernels.dispatch import TRITON_DTYPES

    assert set(COMPILED_OPS) == set(TRITON_DTYPES)
