"""One job of two processes for all tests that need one."""

import sys
from pathlib import Path

import pytest

# Helpers of these tests are plain modules beside them.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]


@pytest.fixture(scope="session")
def started(tmp_path_factory):
    """The folder of one job of two processes that share experts or trunk, and these at work."""
    import sft_runs
    from expert_cases import PARTS
    from expert_runs import make_base
    from ranks import start_ranks
    from rollout_runs import write_prompts

    from checkpoints import build_checkpoint
    from tiny_run import make_base as make_sft_base

    folder = make_base(tmp_path_factory.mktemp("two"))
    make_sft_base(folder / "sft_base")
    # one process's run, whose checkpoint the job goes on from
    sft_runs.train(folder, "one", 1, 1)
    for run in ("one_then_two", "other_rank"):
        sft_runs.begin(folder, run, "one")
    write_prompts(folder / "prompts.jsonl", 8)
    build_checkpoint(folder / "trunk" / "base")
    worker = Path(__file__).with_name("expert_cases.py")
    return folder, start_ranks(worker, 2, folder, 2, *PARTS)


@pytest.fixture(scope="session")
def alone(started):
    """One process's runs by case, made while the job is at work."""
    from expert_runs import CASES, EXACT_CASES, run_alone

    folder, _ = started
    return {case.name: run_alone(folder / "base", case, 2) for case in (*CASES, *EXACT_CASES)}


@pytest.fixture(scope="session")
def ended(started, alone) -> Path:
    """The job's folder when it has ended, well or not; what it printed lies in ``trunk``."""
    from ranks import wait_for

    folder, processes = started
    for rank, output in enumerate(wait_for(processes, timeout_s=600)):
        (folder / "trunk" / f"output-{rank}").write_text(output)
    return folder


@pytest.fixture(scope="session")
def two(ended) -> Path:
    """The folder with all results of the parts about experts."""
    from expert_cases import PARTS

    missing = {
        f"{part}.done-{rank}"
        for part in PARTS.keys() - {"trunk"}
        for rank in (0, 1)
        if not (ended / f"{part}.done-{rank}").exists()
    }
    outputs = [file.read_text() for file in sorted((ended / "trunk").glob("output-*"))]
    assert not missing, "\n".join([f"missing: {sorted(missing)}", *outputs])
    return ended
