"""recipes/sft.py as users run it: files, golden losses, two processes, kills and signals."""

import json
import random
import runpy
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.lora import adapter_state, load_adapter
from k3tune.model import load_base
from k3tune.run_log import read_run_log
from k3tune.train.launch import TERMINATED, USER_ERROR


def losses(output_dir):
    return [record["loss"] for record in read_run_log(output_dir).of_kind("train")]


def curve(output_dir):
    names = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "entropy")
    records = read_run_log(output_dir).of_kind("train")
    return [tuple(record[name] for name in names) for record in records]


def adapter(output_dir):
    return load_file(output_dir / "adapter" / "adapter_model.safetensors")


def metadata(output_dir):
    return json.loads((output_dir / "adapter" / "k3tune.json").read_text())


def run_here(repository, monkeypatch, *words):
    """Call the recipe's main in this process; its exit code."""
    script = str(repository / "recipes" / "sft.py")
    monkeypatch.setattr(sys, "argv", [script, *words])
    names = runpy.run_path(script)
    return names["run_recipe"](names["main"])


def base_of(flags):
    return flags[flags.index("--base") + 1]


@pytest.fixture(scope="module")
def golden(repository):
    return json.loads((repository / "tests/recipes/golden/nano_sft_tiny.json").read_text())


@pytest.mark.parametrize(
    "program", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["main", "program"]
)
def test_the_command_line_trains_to_the_golden_losses(
    start, flags, golden, tmp_path, repository, monkeypatch, program
):
    words = [*flags, "--output_dir", str(tmp_path)]
    if program:
        process = start(*words)
        printed, _ = process.communicate()
        assert process.returncode == 0, printed
    else:
        assert run_here(repository, monkeypatch, *words) == 0
    found = torch.tensor(losses(tmp_path))
    expected = torch.tensor(golden["losses"])
    print(f"largest relative difference {((found - expected) / expected).abs().max():.1e}")
    torch.testing.assert_close(found, expected, rtol=golden["rtol"], atol=0)

    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        *("adapter", "checkpoint-4", "checkpoint-6", "config.yaml", "run_log.jsonl"),
        "router_counts.json",
    }
    model = load_adapter(load_base(base_of(flags), dtype=torch.float32), tmp_path / "adapter")
    state, last = (
        adapter_state(model),
        load_file(tmp_path / "checkpoint-6" / "adapter" / "adapter_model.safetensors"),
    )
    assert all(torch.equal(state[key], last[key]) for key in last)
    assert metadata(tmp_path)["provenance"]["step"] == 6


@pytest.mark.slow
def test_two_processes_under_zero_2_equal_one(launch, flags, tmp_path, repository, monkeypatch):
    """Sums of two halves in fp32 instead of one: the first losses agree to 1e-5, later ones
    as far as Adam carries that on."""
    two, one, moved = (tmp_path / name for name in ("two", "one", "moved"))
    launch("cpu2", *flags, "--per_device_train_batch_size", "4", "--output_dir", str(two))
    assert run_here(repository, monkeypatch, *flags, "--output_dir", str(one)) == 0
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for record, expected in zip(
        read_run_log(two).of_kind("train"), read_run_log(one).of_kind("train"), strict=True
    ):
        for name in ("grad_norm", "grad_norm/experts", "grad_norm/attention"):
            assert record[name] == pytest.approx(expected[name], rel=1e-3)
        for name in ("tokens", "trained_tokens", "num_tokens", "router_load/1"):
            assert record[name] == expected[name]
    # the base's bytes, its F32 tensors among them, are what they were, under DeepSpeed too
    assert metadata(two)["base"] == metadata(one)["base"]

    # the first process goes on alone from what two wrote
    shutil.copytree(two, moved)
    shutil.rmtree(moved / "checkpoint-6")
    assert run_here(repository, monkeypatch, *flags, "--output_dir", str(moved)) == 0
    log = read_run_log(moved)
    assert log.of_kind("run")[-1]["resumed_from"] == "checkpoint-4"
    assert losses(moved)[:4] == losses(two)[:4]
    assert losses(moved) == pytest.approx(losses(two), rel=1e-4)
    for key, tensor in adapter(two).items():
        assert relative_l2(adapter(moved)[key], tensor) < 1e-2


def test_a_dry_run_prints_and_writes_nothing(flags, tmp_path, repository, monkeypatch, capsys):
    words = [*flags, "--output_dir", str(tmp_path / "run"), "--dry_run"]
    assert run_here(repository, monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "lora_rank: 8\n" in printed and "experts: " in printed and "total: " in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bf16", "true"], "error: bf16 is True, expected false: autocast would"),
        (["--base", "missing"], "error: expected a Kimi K3 checkpoint folder"),
        (["--lora_targets", "mlps"], "error: target 'mlps' matches no module"),
        (["--lora_rank", "0"], "error: lora_rank is 0"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence(
    flags, tmp_path, repository, monkeypatch, capsys, words, message
):
    words = [*flags, "--output_dir", str(tmp_path), "--dry_run", *words]
    assert run_here(repository, monkeypatch, *words) == USER_ERROR
    assert message in capsys.readouterr().err


def wait_for_step(output_dir, step):
    """Until the log holds the record of a step."""
    # a process alone takes 8 s to import everything, beside other jobs several times as long
    for _ in range(12_000):
        file = output_dir / "run_log.jsonl"
        if file.is_file() and any(r["step"] >= step for r in read_run_log(file).of_kind("train")):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never logged")


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_equals_the_uninterrupted_one(start, flags, tmp_path):
    steps = ["--max_steps", "14", "--save_steps", "3", "--warmup_steps", "5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(*flags, *steps, "--output_dir", str(whole)).wait() == 0
    step = random.SystemRandom().randrange(1, 13)
    print(f"killed after step {step}")
    process = start(*flags, *steps, "--output_dir", str(killed))
    wait_for_step(killed, step)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert start(*flags, *steps, "--output_dir", str(killed)).wait() == 0
    assert curve(killed) == curve(whole)
    expected = adapter(whole)
    assert all(torch.equal(adapter(killed)[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_sigterm_ends_with_its_exit_code_and_the_command_goes_on(start, flags, tmp_path):
    steps = ["--max_steps", "40", "--save_steps", "1000"]
    words = [*flags, *steps, "--output_dir", str(tmp_path)]
    process = start(*words)
    wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == TERMINATED
    assert read_run_log(tmp_path).of_kind("end")[-1]["reason"] == "terminated"
    assert not (tmp_path / "adapter").exists()
    assert start(*words).wait() == 0
    log = read_run_log(tmp_path)
    assert [record["step"] for record in log.of_kind("train")] == list(range(1, 41))
    assert log.of_kind("end")[-1]["reason"] == "finished"


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_bit_for_bit(launch, flags, tmp_path):
    words = [*flags, "--per_device_train_batch_size", "4"]
    launch("cpu2", *words, "--output_dir", str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoint-6")
    launch("cpu2", *words, "--output_dir", str(tmp_path / "killed"))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    expected = adapter(tmp_path / "whole")
    assert all(torch.equal(adapter(tmp_path / "killed")[key], expected[key]) for key in expected)
