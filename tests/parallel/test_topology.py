"""Four processes, in one group that shares experts or in two: as one process. Slow tier."""

import shutil
from pathlib import Path

import pytest
import sft_runs
from comparisons import check_exact_run, check_run
from expert_runs import CASES, EXACT_CASES, make_base, run_alone
from ranks import run_ranks
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.run_log import read_run_log
from tiny_run import make_base as make_sft_base

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("expert_cases.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs of one process over the batches of four."""
    folder = make_base(tmp_path_factory.mktemp("alone"))
    return folder, {c.name: run_alone(folder / "base", c, 4) for c in (*CASES, *EXACT_CASES)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_four_processes_train_as_one_does(alone, size):
    """Size 2 holds every expert twice, size 1 four times."""
    folder, expected = alone
    run_ranks(WORKER, 4, folder, size, "steps")
    for case in CASES:
        check_run(folder, case, expected[case.name], size, 4)
    for case in EXACT_CASES:
        check_exact_run(folder, case, expected[case.name], size, 4)
    # the next job writes its own
    for adapter in folder.glob("*.adapter"):
        shutil.rmtree(adapter)


def losses(folder, run):
    return [record["loss"] for record in read_run_log(folder / f"sft_{run}").of_kind("train")]


def test_a_run_moves_between_one_two_and_four_ranks_and_back(tmp_path):
    make_sft_base(tmp_path / "sft_base")
    sft_runs.train(tmp_path, "one", 1, 1)
    for run in ("one_to_four", "one_to_two_groups"):
        sft_runs.begin(tmp_path, run, "one")
    run_ranks(WORKER, 4, tmp_path, 4, "sft=four", "sft=one_to_four")
    sft_runs.begin(tmp_path, "four_to_two_groups", "four")
    run_ranks(WORKER, 4, tmp_path, 2, "sft=four_to_two_groups", "sft=one_to_two_groups")
    sft_runs.begin(tmp_path, "four_to_two", "four")
    run_ranks(WORKER, 2, tmp_path, 2, "sft=four_to_two")
    sft_runs.begin(tmp_path, "four_to_one", "four")
    sft_runs.train(tmp_path, "four_to_one", 1, 1)
    expected = losses(tmp_path, "one")
    assert losses(tmp_path, "four") == pytest.approx(expected, rel=1e-5)
    adapter = load_file(tmp_path / "sft_one" / "adapter" / "adapter_model.safetensors")
    moved = [path.name.removeprefix("sft_") for path in tmp_path.glob("sft_*_to_*")]
    assert len(moved) == 5
    for run in moved:
        assert losses(tmp_path, run) == pytest.approx(expected[2:], rel=1e-5), run
        found = load_file(tmp_path / f"sft_{run}" / "adapter" / "adapter_model.safetensors")
        assert found.keys() == adapter.keys()
        for key, tensor in adapter.items():
            assert relative_l2(found[key], tensor) < 1e-4, (run, key)


def test_two_ranks_go_on_bit_for_bit(tmp_path):
    make_sft_base(tmp_path / "sft_base")
    run_ranks(WORKER, 2, tmp_path, 2, "sft=whole")
    sft_runs.begin(tmp_path, "again", "whole")
    run_ranks(WORKER, 2, tmp_path, 2, "sft=again")
    assert losses(tmp_path, "again") == losses(tmp_path, "whole")[2:]
    whole, again = (
        load_file(tmp_path / f"sft_{run}" / "adapter" / "adapter_model.safetensors")
        for run in ("whole", "again")
    )
    assert all(again[key].equal(whole[key]) for key in whole)
