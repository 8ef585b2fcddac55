"""The real command line on a base small enough for a test."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# The tiny base and samples of the training tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from tiny_run import make_base, write_samples


@pytest.fixture(scope="session")
def flags(tmp_path_factory, repository) -> list[str]:
    """nano_sft.yaml with the tiny base: 24 samples, 6 steps of 8, a checkpoint every second."""
    folder = tmp_path_factory.mktemp("recipe")
    base = make_base(folder / "base")
    samples = write_samples(folder / "train.jsonl", 24)
    config = repository / "recipes" / "configs" / "nano_sft.yaml"
    return [
        *("--config", str(config), "--base", str(base), "--train_path", str(samples)),
        *("--max_steps", "6", "--logging_steps", "1", "--save_steps", "2", "--warmup_steps", "2"),
        *("--packing", "false", "--disable_tqdm", "true", "--report_to", "none"),
    ]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a launched process: one thread, so that two processes do not wait for each other."""
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def launch(repository, environment):
    """Run a recipe under ``accelerate launch`` with a config file, or a shipped one by its name."""

    def launch(accelerate_config: str | Path, *words: str, recipe: str = "sft") -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shipped = Path("recipes", "accelerate", f"{accelerate_config}.yaml")
        file = accelerate_config if isinstance(accelerate_config, Path) else shipped
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)),
            *("--main_process_port", str(port), f"recipes/{recipe}.py", *words),
        ]
        result = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    return launch


@pytest.fixture
def start(repository, environment):
    """Start the recipe as a plain Python program."""

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "recipes/sft.py", *words],
            cwd=repository,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start
