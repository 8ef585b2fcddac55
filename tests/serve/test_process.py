"""``k3tune serve`` as users start it: a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

# The tiny run of the RL tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))

from k3tune.commands.serve import adapters_by_name
from k3tune.errors import K3TuneError

COMMAND = "import sys; from k3tune.cli import main; main(sys.argv[1:])"
ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


@contextmanager
def process(repository: Path, *arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process; what it prints is read to its end."""
    environment = os.environ | {"PYTHONPATH": f"{repository}:{repository / 'kernels'}"}
    command = [sys.executable, "-c", COMMAND, "serve", *map(str, arguments), "--port", "0"]
    started = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert started.stderr is not None
    said = []
    try:
        for line in started.stderr:
            said.append(line)
            found = ADDRESS.search(line)
            if found:
                break
        else:
            pytest.fail("".join(said))
        rest = threading.Thread(target=started.stderr.read, daemon=True)
        rest.start()
        yield found[1], started
    finally:
        started.terminate()
        started.wait(60)


@pytest.mark.slow
def test_it_serves_and_lets_answers_end_when_it_is_told_to_stop(repository, folders):
    arguments = (folders / "base", "--adapter", f"a={folders / 'adapters' / 'one'}")
    options = ("--adapter-root", folders / "adapters", "--dtype", "float32", "--max-waiting", 4)
    with process(repository, *arguments, *options) as (url, server):
        assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == [
            "base",
            "a",
        ]
        body = {"model": "a", "prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]" and len(received) >= 200
        assert server.wait(60) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/base"], "no/such/base"),
        (["{base}", "--adapter-root", "no/such/folder"], "expected a folder"),
        (["{base}", "--adapter", "x=no/such/adapter"], "no/such/adapter"),
        (["{base}", "--adapter", "a=x", "--adapter", "a=y"], "each name once"),
    ],
)
def test_mistakes_are_said_in_a_sentence(folders, capsys, arguments, said):
    from command_line import run_command

    filled = [argument.format(base=folders / "base") for argument in arguments]
    status, out, err = run_command(capsys, "serve", *filled, "--kernels", "reference")
    assert status == 2 and out == ""
    assert said in err and "Traceback" not in err


def test_adapters_are_named_by_their_folders():
    named = adapters_by_name(["runs/poet", "critic=runs/b"])
    assert named == {"poet": Path("runs/poet"), "critic": Path("runs/b")}
    for wrong in (["=x"], ["x="], ["a/x", "b/x"]):
        with pytest.raises(K3TuneError, match="each name once"):
            adapters_by_name(wrong)


@pytest.mark.slow
def test_a_run_is_the_one_of_the_local_engine(repository, folders, tmp_path):
    """GRPO over a server in its own process: same tokens, so same rewards, and the same verdict."""
    from tiny_grpo import make_grpo, write_prompts

    from k3tune.arguments import MonitorArguments, RolloutArguments
    from k3tune.run_log import read_run_log
    from tiny_run import adapted

    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    options = ("--adapter-root", folders / "adapters", "--dtype", "float32")
    kept = {}
    with process(repository, folders / "base", *options, "--kernels", "reference") as (url, _):
        for name, rollout in (
            ("local", RolloutArguments()),
            ("served", RolloutArguments(engine="k3tune", engine_urls=[url])),
        ):
            output_dir = folders / "adapters" / f"run-{name}"
            trainer = make_grpo(
                folders / "base",
                prompts,
                output_dir,
                model=adapted(folders / "base"),
                rollout=rollout,
                monitor=MonitorArguments(floor_prompts=4, floor_samples=2),
                max_steps=4,
            )
            trainer.train()
            trainer.engine.close()
            log = read_run_log(output_dir)
            rewards = [record["reward"] for record in log.of_kind("train")]
            verdicts = [record["verdict"] for record in log.of_kind("mismatch")]
            kept[name] = rewards, verdicts
    assert kept["served"] == kept["local"]
    assert kept["local"][1] == ["at floor"] * 4
