"""The SFT trainer over two processes that share experts: its run, files, and going on elsewhere."""

import json

import pytest
import sft_runs
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from closeness import relative_l2
from k3tune.errors import ConfigError
from k3tune.lora import load_adapter
from k3tune.model import load_base
from k3tune.run_log import read_run_log
from k3tune.train.optimizer_state import save_optimizer


def records(folder, run):
    return read_run_log(folder / f"sft_{run}").of_kind("train")


def losses(folder, run):
    return [record["loss"] for record in records(folder, run)]


def adapter(folder, run):
    return load_file(folder / f"sft_{run}" / "adapter" / "adapter_model.safetensors")


def assert_same_run(folder, actual, expected):
    found = losses(folder, actual)
    assert found == pytest.approx(losses(folder, expected)[-len(found) :], rel=1e-5)
    found, wanted = adapter(folder, actual), adapter(folder, expected)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert relative_l2(found[key], tensor) < 1e-4, key


def test_two_processes_run_as_one_does(two):
    assert_same_run(two, "two", "one")
    for record, expected in zip(records(two, "two"), records(two, "one"), strict=True):
        for name in (n for n in expected if n.startswith("grad_norm")):
            assert record[name] == pytest.approx(expected[name], rel=1e-5), name
        for name in ("tokens", "trained_tokens", "num_tokens", "router_load/1"):
            assert record[name] == expected[name]


def test_files_do_not_know_how_many_processes_wrote_them(two):
    for name in ("adapter", "checkpoint-4/adapter"):
        found, expected = ((two / f"sft_{run}" / name) for run in ("two", "one"))
        config = "adapter_config.json"
        assert (found / config).read_text() == (expected / config).read_text()
        # the whole base's fingerprint, out of the digests of both processes
        bases = [
            json.loads((path / "k3tune.json").read_text())["base"] for path in (found, expected)
        ]
        assert bases[0] == bases[1]
    loaded = load_adapter(load_base(two / "sft_base"), two / "sft_two" / "adapter")
    assert loaded.peft_config["default"].r == 2
    states = [
        load_file(two / f"sft_{r}/checkpoint-4/optimizer-00001.safetensors") for r in ("two", "one")
    ]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][key].shape == states[1][key].shape for key in states[1])


def test_two_go_on_from_what_one_wrote(two):
    assert [record["step"] for record in records(two, "one_then_two")] == [3, 4, 5]
    assert_same_run(two, "one_then_two", "one")


class KeepState(TrainerCallback):
    """Writes the optimizer's state down as it is when training begins."""

    def __init__(self, folder):
        self.folder, self.trainer = folder, None

    def on_train_begin(self, args, state, control, **_):
        save_optimizer(self.trainer.optimizer_view, self.folder, writes=True)


def test_one_goes_on_from_what_two_wrote_with_every_moment(two, tmp_path):
    sft_runs.begin(two, "two_then_one", "two")
    trainer = sft_runs.make_trainer(two, "two_then_one", 1, 1)
    keep = KeepState(tmp_path)
    keep.trainer = trainer
    trainer.add_callback(keep)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    written = load_file(two / "sft_two" / "checkpoint-2" / "optimizer-00001.safetensors")
    restored = load_file(tmp_path / "optimizer-00001.safetensors")
    assert written.keys() == restored.keys()
    assert all(torch.equal(restored[key], written[key]) for key in written)
    assert losses(two, "two_then_one") == pytest.approx(losses(two, "two")[2:], rel=1e-5)
    for key, tensor in adapter(two, "two").items():
        assert relative_l2(adapter(two, "two_then_one")[key], tensor) < 1e-4


def test_another_number_of_rows_a_step_is_refused(two):
    sft_runs.begin(two, "fewer_rows", "two")
    with pytest.raises(ConfigError, match="a run of 4 rows a step, this one has 2"):
        sft_runs.train(two, "fewer_rows", 1, 2)


def test_the_log_says_what_crossed(two):
    for record in records(two, "two"):
        rows = record["tokens"] * 2
        # about half of the rows are of experts here
        assert 0 < record["exchange_bytes/dispatch"] < rows * 32 * 4
        assert record["exchange_bytes/gradient"] == pytest.approx(
            2 * record["exchange_bytes/dispatch"], rel=0.2
        )
        assert record["exchange_messages"] > 0
    assert "exchange_messages" not in records(two, "one")[0]
