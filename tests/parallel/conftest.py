"""One job of two processes for all tests of expert parallelism that need one."""

import sys
from pathlib import Path

import pytest

# Helpers of these tests are plain modules beside them.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]


@pytest.fixture(scope="session")
def started(tmp_path_factory):
    """The folder of one job of two processes that share experts, and the processes at work."""
    import sft_runs
    from expert_cases import PARTS
    from expert_runs import make_base
    from ranks import start_ranks
    from rollout_runs import write_prompts

    from tiny_run import make_base as make_sft_base

    folder = make_base(tmp_path_factory.mktemp("two"))
    make_sft_base(folder / "sft_base")
    # one process's run, whose checkpoint the job goes on from
    sft_runs.train(folder, "one", 1, 1)
    for run in ("one_then_two", "other_rank"):
        sft_runs.begin(folder, run, "one")
    write_prompts(folder / "prompts.jsonl", 8)
    worker = Path(__file__).with_name("expert_cases.py")
    return folder, start_ranks(worker, 2, folder, 2, *PARTS)


@pytest.fixture(scope="session")
def alone(started):
    """One process's runs by case, made while the job is at work."""
    from expert_runs import CASES, EXACT_CASES, run_alone

    folder, _ = started
    return {case.name: run_alone(folder / "base", case, 2) for case in (*CASES, *EXACT_CASES)}


@pytest.fixture(scope="session")
def two(started, alone) -> Path:
    """The folder with all results of the job."""
    from ranks import finish

    folder, processes = started
    finish(processes)
    return folder
