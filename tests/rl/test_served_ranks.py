"""GRPO of two processes over one server: the first pushes whole adapters, both sample."""

import sys
from pathlib import Path

import pytest

# The server of the serving tests, and the jobs of the parallel ones.
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

import rollout_runs
import torch
from ranks import run_ranks
from running import start
from safetensors.torch import load_file
from tiny_grpo import write_prompts

from closeness import relative_l2
from k3tune.run_log import read_run_log
from tiny_run import make_base


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of one job's runs, and of one process's with the local engine."""
    root = tmp_path_factory.mktemp("served")
    make_base(root / "base")
    folder = root / "adapters"
    folder.mkdir()
    (folder / "sft_base").symlink_to(root / "base")
    write_prompts(folder / "prompts.jsonl", 8)
    with start(root) as server:
        run_ranks(Path(__file__).with_name("served_ranks.py"), 2, folder, server.url)
    rollout_runs.train_grpo(folder, "one", 1, 1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["whole", "spread"])
def test_two_processes_over_a_server_train_as_one_does_alone(runs, run):
    actual, expected = (read_run_log(runs / f"grpo_{name}") for name in (run, "one"))
    steps = list(zip(actual.of_kind("train"), expected.of_kind("train"), strict=True))
    assert len(steps) == 2
    for record, wanted in steps:
        assert record["reward"] == pytest.approx(wanted["reward"])
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
    verdicts = [record["verdict"] for record in actual.of_kind("mismatch")]
    assert verdicts == ["at floor"] * 2
    trained, alone = (
        load_file(runs / f"grpo_{name}" / "adapter" / "adapter_model.safetensors")
        for name in (run, "one")
    )
    assert trained.keys() == alone.keys()
    keys = sorted(alone)
    both = [torch.cat([state[key].flatten() for key in keys]) for state in (trained, alone)]
    assert relative_l2(*both) < 1e-4


@pytest.mark.slow
def test_they_sample_ahead(runs):
    log = read_run_log(runs / "grpo_ahead")
    assert [record["version_lag"] for record in log.of_kind("mismatch")] == [0, 1, 1]
    # of each process
    assert [record["stale_samples"] for record in log.of_kind("train")] == [0, 2, 2]


@pytest.mark.slow
def test_servers_and_disk_are_left_empty(runs):
    for run in ("whole", "spread", "ahead"):
        pushed = runs / f"grpo_{run}" / "pushed"
        assert [path.name for path in pushed.iterdir()] == ["template"]
