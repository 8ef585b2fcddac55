"""GRPO over ``k3tune serve``: pushes by path, experts, the floor, and the canary."""

import sys
from pathlib import Path

import pytest
import torch

# The server of the serving tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from running import make_folders, start
from tiny_grpo import make_grpo

from k3tune.arguments import MonitorArguments, RolloutArguments
from k3tune.errors import RolloutError
from k3tune.run_log import read_run_log
from tiny_run import adapted

MONITOR = MonitorArguments(floor_prompts=4, floor_samples=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("serve"))


@pytest.mark.slow
def test_a_run_over_a_server_is_at_its_floor(folders, prompts_file):
    output_dir = folders / "adapters" / "run"
    with start(folders, routing=True) as server:
        rollout = RolloutArguments(engine="k3tune", engine_urls=[server.url], routing="compare")
        trainer = make_grpo(
            folders / "base",
            prompts_file,
            output_dir,
            model=adapted(folders / "base"),
            rollout=rollout,
            monitor=MONITOR,
            max_steps=3,
        )
        trainer.train()
        trainer.engine.close()
    log = read_run_log(output_dir)
    [floor] = log.of_kind("floor")
    print(f"floor {floor['k3']}, parts {floor['parts']}")
    assert floor["k3"]["high"] < 1e-8
    steps = log.of_kind("mismatch")
    assert [record["verdict"] for record in steps] == ["at floor"] * 3
    assert [record["canary"]["verdict"] for record in steps] == [
        *("nothing moved", "moved together", "moved together"),
    ]
    assert all(record["router_mismatch"] == 0 for record in steps)


@pytest.mark.slow
def test_a_server_with_another_base_is_refused_before_a_sample(folders, prompts_file):
    model = adapted(folders / "base")
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(4)
    with start(folders) as server:
        trainer = make_grpo(
            folders / "base",
            prompts_file,
            folders / "adapters" / "other",
            model=model,
            rollout=RolloutArguments(engine="k3tune", engine_urls=[server.url]),
            monitor=MONITOR,
        )
        with pytest.raises(RolloutError, match="serve the checkpoint the trainer loads"):
            trainer.train()
        trainer.engine.close()
    assert not (folders / "adapters" / "other" / "rollouts").exists()
