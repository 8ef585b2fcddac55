"""recipes/grpo.py as users run it: files, a reward of their own, errors, two processes, kills."""

import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

# The tiny prompts of the RL tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))

from tiny_grpo import write_prompts

from k3tune.lora import adapter_state, load_adapter
from k3tune.model import load_base
from k3tune.run_log import read_run_log
from k3tune.train.launch import USER_ERROR
from tiny_run import make_base

REWARD = (
    "def length(completion_ids, **_):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory, repository) -> list[str]:
    """nano_grpo.yaml with the tiny base: 8 prompts, 3 steps of two prompts and two samples."""
    folder = tmp_path_factory.mktemp("grpo")
    base = make_base(folder / "base")
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    (folder / "mine.py").write_text(REWARD)
    config = repository / "recipes" / "configs" / "nano_grpo.yaml"
    return [
        *("--config", str(config), "--base", str(base), "--train_path", str(prompts)),
        *("--rewards", f"{folder / 'mine.py'}:length", "format"),
        *("--num_generations", "2", "--per_device_train_batch_size", "4"),
        *("--max_completion_length", "6", "--max_steps", "3", "--save_steps", "2"),
        *("--floor_prompts", "4", "--floor_samples", "2"),
        *("--disable_tqdm", "true", "--report_to", "none"),
    ]


def run_here(repository, monkeypatch, *words):
    """Call the recipe's main in this process; its exit code."""
    script = str(repository / "recipes" / "grpo.py")
    monkeypatch.setattr(sys, "argv", [script, *words])
    names = runpy.run_path(script)
    return names["run_recipe"](names["main"])


def adapter(output_dir):
    return load_file(output_dir / "adapter" / "adapter_model.safetensors")


def curve(output_dir):
    names = ("step", "loss", "grad_norm", "reward", "reward/length", "num_tokens", "entropy")
    records = read_run_log(output_dir).of_kind("train")
    return [tuple(record[name] for name in names) for record in records]


def test_the_recipe_trains_and_leaves_its_files(words, tmp_path, repository, monkeypatch):
    assert run_here(repository, monkeypatch, *words, "--output_dir", str(tmp_path)) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        *("adapter", "checkpoint-2", "checkpoint-3", "config.yaml", "run_log.jsonl"),
        *("rollouts", "floor.json", "canary.json", "router_counts.json"),
    }
    log = read_run_log(tmp_path)
    kinds = [record["kind"] for record in log.records if record["kind"] != "worst"]
    assert kinds == ["run", "floor", *["mismatch", "train"] * 3, "end"]
    assert {record["verdict"] for record in log.of_kind("mismatch")} == {"at floor"}
    base = words[words.index("--base") + 1]
    model = load_adapter(load_base(base, dtype=torch.float32), tmp_path / "adapter")
    state = adapter_state(model)
    last = load_file(tmp_path / "checkpoint-3" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(state[key], last[key]) for key in last)


def test_a_dry_run_prints_and_writes_nothing(words, tmp_path, repository, monkeypatch, capsys):
    options = ["--output_dir", str(tmp_path / "run"), "--dry_run"]
    assert run_here(repository, monkeypatch, *words, *options) == 0
    printed = capsys.readouterr().out
    assert "importance_sampling: token_truncate\n" in printed and "experts: " in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bf16", "true"], "error: bf16 is True, expected false: autocast would"),
        (["--top_p", "0.9"], "error: top_p is 0.9, which would not be read"),
        (["--use_vllm", "true"], "error: use_vllm is True, which would not be read: engine says"),
        (["--importance_cap", "0.5"], "error: importance_cap is 0.5, expected a number above 1"),
        (["--max_completion_length", "0"], "error: max_completion_length is 0, expected an int"),
        (["--max_prompt_length", str(2**31)], "error: max_prompt_length + max_completion_length"),
        (["--rewards", "accuracy"], "error: rewards holds 'accuracy', expected exact_match, "),
        (["--rewards", "none_such:f"], "error: cannot load none_such, which rewards names: Mod"),
        (["--reward_weights", "1.0"], "error: reward_weights are [1.0], expected one for each"),
        (["--floor_prompts", "2"], "error: floor_prompts is 2, expected 0 or at least 4"),
        (
            ["--on_stale_version", "correct", "--importance_sampling", "none"],
            "error: on_stale_version is 'correct' and importance_sampling is 'none'",
        ),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence(
    words, tmp_path, repository, monkeypatch, capsys, more, message
):
    options = [*words, "--output_dir", str(tmp_path), "--dry_run", *more]
    assert run_here(repository, monkeypatch, *options) == USER_ERROR
    assert message in capsys.readouterr().err


def start(repository, environment, *words):
    """The recipe as a plain Python program."""
    return subprocess.Popen(
        [sys.executable, "recipes/grpo.py", *words],
        cwd=repository,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_equals_the_uninterrupted_one(
    words, tmp_path, repository, environment
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ["--max_steps", "12", "--save_steps", "3"]
    assert start(repository, environment, *words, *steps, "--output_dir", str(whole)).wait() == 0
    step = random.SystemRandom().randrange(1, 11)
    print(f"killed after step {step}")
    process = start(repository, environment, *words, *steps, "--output_dir", str(killed))
    file = killed / "run_log.jsonl"
    while not file.is_file() or all(
        record["step"] < step for record in read_run_log(file).of_kind("train")
    ):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(repository, environment, *words, *steps, "--output_dir", str(killed)).wait() == 0
    assert curve(killed) == curve(whole)
    expected = adapter(whole)
    assert all(torch.equal(adapter(killed)[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_two_processes_sample_and_train_as_one(words, tmp_path, repository, environment):
    """Each process has one of the two prompts; their samples are those of one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert start(repository, environment, *words, "--output_dir", str(one)).wait() == 0
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("recipes/grpo.py", *words, "--per_device_train_batch_size", "2"),
        *("--output_dir", str(two)),
    ]
    result = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # sums of two halves instead of one: the first step agrees, later ones as far as Adam lets them
    first, expected = curve(two)[0], curve(one)[0]
    assert first[3:6] == pytest.approx(expected[3:6])
    assert first[2] == pytest.approx(expected[2], rel=1e-3)
    found, wanted = (read_run_log(folder).of_kind("mismatch")[0] for folder in (two, one))
    assert found["num_samples"] == wanted["num_samples"] == 4
    assert found["num_tokens"] == wanted["num_tokens"]
