"""N + M steps equal N, then M with a new trainer and engine: curve, samples, adapter, tests."""

import json

import pytest
import torch
from tiny_grpo import make_grpo
from transformers import TrainerCallback

from k3tune.arguments import MonitorArguments
from k3tune.errors import ConfigError
from k3tune.lora import adapter_state
from k3tune.run_log import read_run_log

RUN = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}
MONITOR = MonitorArguments(floor_prompts=4, floor_samples=2)
# 8 prompts and two a step: an epoch has four steps
NAMES = ("step", "loss", "grad_norm", "learning_rate", "reward", "num_tokens", "entropy", "epoch")
WATCHED = ("step", "adapter_version", "verdict", "k3", "abs_max", "ewma", "cusum", "canary")


class StopAfter(TrainerCallback):
    """Ends a run as if it had been killed once a step was done and saved."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def curve(output_dir):
    log = read_run_log(output_dir)
    return (
        [tuple(record[name] for name in NAMES) for record in log.of_kind("train")],
        [tuple(record[name] for name in WATCHED) for record in log.of_kind("mismatch")],
    )


def samples(output_dir, step):
    lines = (output_dir / "rollouts" / f"step-{step}.0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(base_folder, prompts_file, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    trainer = make_grpo(base_folder, prompts_file, output_dir, monitor=MONITOR, **RUN)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "step",
    [pytest.param(3, marks=pytest.mark.slow, id="within_an_epoch"), pytest.param(5, id="the_next")],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    base_folder, prompts_file, tmp_path, uninterrupted, step
):
    killed = make_grpo(
        base_folder, prompts_file, tmp_path, monitor=MONITOR, callbacks=[StopAfter(step)], **RUN
    )
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make_grpo(base_folder, prompts_file, tmp_path, monitor=MONITOR, **RUN)
    resumed.train(resume_from_checkpoint=True)

    assert curve(tmp_path) == curve(uninterrupted.output_dir)
    assert samples(tmp_path, 6) == samples(uninterrupted.output_dir, 6)
    actual, expected = adapter_state(resumed.model), adapter_state(uninterrupted.model)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    floors = read_run_log(tmp_path).of_kind("floor")
    assert [floor["reused"] for floor in floors] == [False, True]


def test_other_sampling_is_refused(base_folder, prompts_file, uninterrupted):
    trainer = make_grpo(
        base_folder, prompts_file, uninterrupted.output_dir, monitor=MONITOR, temperature=0.9, **RUN
    )
    with pytest.raises(ConfigError, match="temperature"):
        trainer.train(resume_from_checkpoint=True)
