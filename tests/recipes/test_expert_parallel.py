"""recipes/sft.py with experts shared by processes, through accelerate's launcher."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.run_log import read_run_log

pytestmark = pytest.mark.slow


def losses(output_dir):
    return [record["loss"] for record in read_run_log(output_dir).of_kind("train")]


def adapter(output_dir):
    return load_file(output_dir / "adapter" / "adapter_model.safetensors")


def test_one_line_of_yaml_shares_the_experts(launch, start, flags, repository, tmp_path):
    config = yaml.safe_load((repository / "recipes" / "configs" / "nano_sft.yaml").read_text())
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump({**config, "expert_parallel_size": 2}))
    words = list(flags)
    words[words.index("--config") + 1] = str(file)
    two, one = tmp_path / "two", tmp_path / "one"
    launch("cpu2", *words, "--per_device_train_batch_size", "4", "--output_dir", str(two))
    assert start(*flags, "--output_dir", str(one)).wait() == 0
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for key, tensor in adapter(one).items():
        assert relative_l2(adapter(two)[key], tensor) < 1e-3, key
    bases = [
        json.loads((run / "adapter" / "k3tune.json").read_text())["base"] for run in (two, one)
    ]
    assert bases[0] == bases[1]


def begin(repository, environment, *words):
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", "recipes/accelerate/cpu2.yaml", "--main_process_port", "0"),
        *("recipes/sft.py", "--expert_parallel_size", "2", *words),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=repository, env=environment, text=True, **pipes)


def process_of(launcher, rank):
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no process of rank {rank}")


def wait_for_step(output_dir, step):
    """Until the log holds the record of a step."""
    for _ in range(12000):
        file = output_dir / "run_log.jsonl"
        if file.is_file() and any(r["step"] >= step for r in read_run_log(file).of_kind("train")):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never logged")


def test_a_killed_process_ends_the_job_and_the_last_checkpoint_goes_on(
    launch, repository, environment, flags, tmp_path
):
    words = [*flags, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path)]
    steps = ["--max_steps", "400", "--save_steps", "2", "--save_total_limit", "1"]
    launcher = begin(repository, environment, *words, *steps)
    wait_for_step(tmp_path, 4)
    os.kill(process_of(launcher, 1).pid, signal.SIGKILL)
    killed_s = time.monotonic()
    printed, _ = launcher.communicate(timeout=60)
    print(f"ended after {time.monotonic() - killed_s:.1f} s")
    assert launcher.returncode != 0
    assert "SIGKILL" in printed
    done = read_run_log(tmp_path).of_kind("train")[-1]["step"]
    launch("cpu2", "--expert_parallel_size", "2", *words, "--max_steps", str(done + 4), *steps[2:])
    log = read_run_log(tmp_path)
    assert log.of_kind("run")[-1]["resumed_from"].startswith("checkpoint-")
    assert log.of_kind("end")[-1]["reason"] == "finished"
