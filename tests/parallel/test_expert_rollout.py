"""Sampling and GRPO over two processes that share experts."""

import json

import pytest
import rollout_runs
import torch
from expert_runs import CASES, build
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.run_log import read_run_log


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_samples_what_it_would_alone_however_long_the_others_do(two, rank):
    model = build(two / "base", CASES[0])
    expected = rollout_runs.sample(model, rank)
    found = json.loads((two / f"rollout-{rank}").read_text())
    for name, alone in expected.items():
        assert found[name]["ids"] == alone["ids"]
        for kind in ("logprobs", "scores"):
            for actual, wanted in zip(found[name][kind], alone[kind], strict=True):
                torch.testing.assert_close(
                    torch.tensor(actual), torch.tensor(wanted), rtol=0, atol=2e-5
                )


def test_grpo_over_two_processes_trains_as_one_does(two):
    rollout_runs.train_grpo(two, "one", 1, 1)
    actual, expected = (read_run_log(two / f"grpo_{run}") for run in ("two", "one"))
    steps = list(zip(actual.of_kind("train"), expected.of_kind("train"), strict=True))
    assert len(steps) == 2
    for record, wanted in steps:
        assert record["reward"] == pytest.approx(wanted["reward"])
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    trained, alone = (
        load_file(two / f"grpo_{run}" / "adapter" / "adapter_model.safetensors")
        for run in ("two", "one")
    )
    assert trained.keys() == alone.keys()
    keys = sorted(alone)
    both = [torch.cat([state[key].flatten() for key in keys]) for state in (trained, alone)]
    assert relative_l2(*both) < 1e-4
