"""``k3tune serve`` as users start it: a process of its own."""

import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

# The tiny run of the RL tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))

from running import process

from k3tune.commands.serve import adapters_by_name
from k3tune.errors import K3TuneError
from k3tune.rl.engines.http import HttpOptions
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.rollout import Rollout, Sampling


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


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_step_costs_no_sample(repository, folders):
    """Started again at its address it is given its adapter back, and the step ends as it would."""
    arguments = (folders / "base", "--adapter-root", folders / "adapters", "--dtype", "float32")
    prompts, seeds = [[number % 50, 7] for number in range(160)], list(range(160))
    sampling = Sampling(100, stop_token_ids=())
    with process(repository, *arguments, "--kernels", "reference") as (url, _):
        engine = HttpEngine([url], VllmDialect(), HttpOptions(max_backoff_s=1, progress=False))
        engine.load_adapter(1, folders / "adapters" / "one")
        expected = engine.generate(prompts, sampling, seeds)
        engine.close()
    found: list[Rollout] = []
    with process(repository, *arguments, "--kernels", "reference") as (url, server):
        engine = HttpEngine([url], VllmDialect(), HttpOptions(max_backoff_s=1, progress=False))
        engine.load_adapter(1, folders / "adapters" / "one")
        step = threading.Thread(
            target=lambda: found.extend(engine.generate(prompts, sampling, seeds))
        )
        step.start()
        time.sleep(1)
        server.kill()
        server.wait()
        assert step.is_alive()
    port = int(url.rpartition(":")[2])
    with process(repository, *arguments, "--kernels", "reference", port=port):
        step.join(120)
        engine.close()
    assert [rollout.prompt_ids for rollout in found] == [tuple(prompt) for prompt in prompts]
    assert {len(rollout.completion_ids) for rollout in found} == {100}
    same = sum(a.completion_ids == b.completion_ids for a, b in zip(found, expected, strict=True))
    # other batches round otherwise, which moves a draw once in some ten thousand tokens
    assert same >= 155, same
    assert {rollout.adapter_version for rollout in found} == {1}


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
