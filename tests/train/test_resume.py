"""N + M steps equal N, then M in a new process's trainer: loss curve and adapter, bit for bit."""

import os
import pickle
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from k3tune.errors import CheckpointError, ConfigError
from k3tune.lora import adapter_state
from k3tune.run_log import read_run_log
from k3tune.train.launch import TERMINATED
from tiny_run import adapted, make_trainer, rows

RUN = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}


class StopAfter(TrainerCallback):
    """Ends a run as if it had been killed once a step was done and saved."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def killed_run(base_folder, output_dir, step, **options):
    trainer = make_trainer(base_folder, output_dir, callbacks=[StopAfter(step)], **RUN, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def whole_run(base_folder, output_dir, **options):
    trainer = make_trainer(base_folder, output_dir, **{**RUN, **options})
    trainer.train(resume_from_checkpoint=True)
    return trainer


def curve(output_dir):
    names = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "entropy", "epoch")
    records = read_run_log(output_dir).of_kind("train")
    return [tuple(record[name] for name in names) for record in records]


def assert_same_adapter(actual, expected):
    actual, expected = adapter_state(actual.model), adapter_state(expected.model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def uninterrupted(base_folder, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    return output_dir, whole_run(base_folder, output_dir)


@pytest.mark.parametrize("step", [2, 4], ids=["end_of_an_epoch", "end_of_the_next"])
def test_a_resumed_run_equals_the_uninterrupted_one(base_folder, tmp_path, uninterrupted, step):
    output_dir, expected = uninterrupted
    killed_run(base_folder, tmp_path, step)
    actual = whole_run(base_folder, tmp_path)
    assert curve(tmp_path) == curve(output_dir)
    assert_same_adapter(actual, expected)


def test_also_within_an_epoch_with_dropout_and_records_of_several_steps(base_folder, tmp_path):
    run = {"max_steps": 5, "save_steps": 3, "logging_steps": 2}
    run |= {"optim": "sgd", "optim_args": "momentum=0.9"}
    dataset = rows((5, 9, 12, 4, 8, 7, 6, 10, 11, 13, 14, 5, 6, 7, 8, 9))

    def train(folder, **more):
        model = adapted(base_folder, targets=("attention", "latent"), dropout=0.3)
        options = {**RUN, **run, **more}
        return make_trainer(base_folder, folder, dataset, model=model, **options)

    expected = train(tmp_path / "whole")
    expected.train()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", callbacks=[StopAfter(3)]).train()
    actual = train(tmp_path / "killed")
    actual.train(resume_from_checkpoint=True)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert [record[0] for record in curve(tmp_path / "whole")] == [2, 3, 4, 5]
    assert_same_adapter(actual, expected)


def test_a_damaged_newest_checkpoint_costs_its_steps_only(base_folder, tmp_path, uninterrupted):
    output_dir, expected = uninterrupted
    killed_run(base_folder, tmp_path, 4)
    file = tmp_path / "checkpoint-4" / "optimizer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    actual = whole_run(base_folder, tmp_path)
    log = read_run_log(tmp_path)
    assert [record["resumed_from"] for record in log.of_kind("run")] == [None, "checkpoint-2"]
    assert log.num_superseded == 2
    assert curve(tmp_path) == curve(output_dir)
    assert_same_adapter(actual, expected)


def test_a_checkpoint_named_by_path_must_be_whole(base_folder, tmp_path):
    killed_run(base_folder, tmp_path, 2)
    (tmp_path / "checkpoint-2" / "scheduler.json").unlink()
    trainer = make_trainer(base_folder, tmp_path, **RUN)
    with pytest.raises(CheckpointError, match=r"scheduler.json is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_files_are_safetensors_and_json_and_no_pickle_is_made_or_read(
    base_folder, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise AssertionError("pickle was used")

    for module, name in (
        (pickle, "dump"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (torch, "save"),
        (torch, "load"),
        (torch.serialization, "_save"),
        (torch.serialization, "_load"),
    ):
        monkeypatch.setattr(module, name, refuse)
    killed_run(base_folder, tmp_path, 2)
    trainer = whole_run(base_folder, tmp_path)
    trainer.save_model()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    written = {file.suffix for file in files if file.parent != tmp_path}
    assert written == {".safetensors", ".json"}
    assert {file.name for file in files if file.parent == tmp_path} == {
        "config.yaml",
        "router_counts.json",
        "run_log.jsonl",
    }


def test_checkpoints_name_state_after_parameters(uninterrupted):
    output_dir, trainer = uninterrupted
    stored = load_file(output_dir / "checkpoint-6" / "optimizer-00001.safetensors")
    names = trainer.optimizer_view.parameters
    assert stored.keys() == {f"{name}/{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    for name, parameter in names.items():
        assert stored[f"{name}/exp_avg"].shape == parameter.shape


def test_a_checkpoints_adapter_is_the_adapter_in_fp32(uninterrupted):
    output_dir, trainer = uninterrupted
    stored = load_file(output_dir / "checkpoint-6" / "adapter" / "adapter_model.safetensors")
    state = adapter_state(trainer.model)
    assert all(torch.equal(stored[key], state[key]) for key in state)


def test_the_limit_of_checkpoints_is_kept(base_folder, tmp_path):
    whole_run(base_folder, tmp_path, save_total_limit=1)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"seed \(was 42, is 1\)"),
        ({"optim": "sgd"}, r"optim \(was 'adamw_torch_fused', is 'sgd'\)"),
        ({"gradient_accumulation_steps": 1}, "a run of 4 rows a step, this one has 2"),
    ],
)
def test_a_checkpoint_of_other_options_is_refused(base_folder, tmp_path, options, message):
    killed_run(base_folder, tmp_path, 2)
    with pytest.raises(ConfigError, match=message):
        whole_run(base_folder, tmp_path, **options)


def test_a_checkpoint_over_other_data_is_refused(base_folder, tmp_path):
    killed_run(base_folder, tmp_path, 2)
    other = make_trainer(base_folder, tmp_path, rows(masked=3).select(range(7)), **RUN)
    with pytest.raises(ConfigError, match=r"8 rows of other data than the 7 rows here"):
        other.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_adapter_is_refused(base_folder, tmp_path):
    killed_run(base_folder, tmp_path, 2)
    other = make_trainer(base_folder, tmp_path, model=adapted(base_folder, rank=3), **RUN)
    with pytest.raises(CheckpointError, match="resume with the same LoRA options"):
        other.train(resume_from_checkpoint=True)


def test_a_longer_run_goes_on_with_a_warning(base_folder, tmp_path, caplog):
    killed_run(base_folder, tmp_path, 2)
    whole_run(base_folder, tmp_path, max_steps=7)
    assert "max_steps (was 6, is 7)" in caplog.text


class Terminate(TrainerCallback):
    """Sends the signal a scheduler sends."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_stops_and_leaves_a_run_that_goes_on(base_folder, tmp_path, uninterrupted):
    output_dir, expected = uninterrupted
    before = signal.getsignal(signal.SIGTERM)
    stopped = make_trainer(base_folder, tmp_path, callbacks=[Terminate()], **RUN)
    stopped.train()
    assert (stopped.terminated, stopped.exit_code) == (True, TERMINATED)
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_run_log(tmp_path).of_kind("end")[0]["reason"] == "terminated"
    assert (tmp_path / "checkpoint-3").is_dir()
    actual = whole_run(base_folder, tmp_path)
    assert (actual.terminated, actual.exit_code) == (False, 0)
    assert curve(tmp_path) == curve(output_dir)
    assert_same_adapter(actual, expected)


def test_the_best_adapter_is_loaded_at_the_end(base_folder, tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "save_total_limit": 1,
    }
    trainer = make_trainer(base_folder, tmp_path, eval_dataset=rows(), **{**RUN, **options})
    trainer.train()
    # the loss falls, and the greatest was asked for
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    stored = load_file(best / "adapter" / "adapter_model.safetensors")
    state = adapter_state(trainer.model)
    assert all(torch.equal(stored[key], state[key]) for key in state)
