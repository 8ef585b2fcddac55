"""Servers that drop, delay, repeat, cut and restart: no sample is lost, doubled or mixed up."""

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from k3tune.errors import RolloutError
from k3tune.rl.engines.http import HttpOptions
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.sglang import SglangDialect
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.rollout import Rollout, Sampling
from rollout_servers import FakeServer, Faults, logprob_of, tokens_of, write_effect

RATES = {
    "drop": 0.03,
    "delay": 0.03,
    "slow": 0.01,
    "duplicate": 0.03,
    "truncate": 0.03,
    "garble": 0.02,
    "swap": 0.02,
    "wrong_model": 0.02,
    "short": 0.02,
    "abort": 0.02,
    "500": 0.02,
    "502": 0.02,
    "503": 0.02,
    "429": 0.02,
}
OPTIONS = HttpOptions(
    backoff_s=0.01,
    max_backoff_s=0.1,
    request_timeout_s=60,
    step_timeout_s=600,
    max_attempts=12,
    max_concurrency=8,
    progress=False,
)
SAMPLING = Sampling(6)


def engine_over(servers: Sequence[FakeServer], options: HttpOptions = OPTIONS) -> HttpEngine:
    dialect = VllmDialect() if servers[0].kind == "vllm" else SglangDialect()
    return HttpEngine([server.url for server in servers], dialect, options)


def effect_of(version: int) -> float:
    return version / 4


def check(rollouts: Sequence[Rollout], prompts: Sequence[list[int]], version: int) -> None:
    """Each sample is there once, in its place, whole, and of the version it says."""
    assert len(rollouts) == len(prompts)
    effect = effect_of(version)
    for seed, (rollout, prompt) in enumerate(zip(rollouts, prompts, strict=True)):
        tokens = tokens_of(effect, prompt, seed, SAMPLING.max_new_tokens)
        row = [*prompt, *tokens]
        assert rollout.prompt_ids == tuple(prompt)
        assert rollout.completion_ids == tuple(tokens)
        assert rollout.adapter_version == version
        places = range(len(prompt), len(row))
        expected = [min(0.0, logprob_of(effect, place, row[place])) for place in places]
        assert list(rollout.logprobs) == pytest.approx(expected)


def sample_steps(
    servers: Sequence[FakeServer], folder: Path, num_steps: int, num_samples: int
) -> None:
    engine = engine_over(servers)
    for version in range(1, num_steps + 1):
        engine.load_adapter(version, write_effect(folder / str(version), effect_of(version)))
        prompts = [[10 + index % 50, version, index % 200] for index in range(num_samples)]
        rollouts = engine.generate(prompts, SAMPLING, list(range(num_samples)))
        check(rollouts, prompts, version)
    engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_replicas_that_fail_in_every_way_lose_nothing(kind, tmp_path):
    with (
        FakeServer(kind, Faults(RATES, 1, restart_at=(30,))) as first,
        FakeServer(kind, Faults(RATES, 2, restart_at=(45,))) as second,
    ):
        sample_steps([first, second], tmp_path, num_steps=2, num_samples=60)
        for server in (first, second):
            assert server.counts["restarts"] == 1
        seen = first.counts + second.counts
        assert sum(seen[kind] for kind in RATES) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_ten_thousand_samples_lose_nothing(kind, tmp_path):
    restarts = (700, 1900, 3100)
    with (
        FakeServer(kind, Faults(RATES, 3, restart_at=restarts)) as first,
        FakeServer(kind, Faults(RATES, 4, restart_at=restarts)) as second,
    ):
        sample_steps([first, second], tmp_path, num_steps=10, num_samples=1000)
        assert all(first.counts[name] + second.counts[name] > 20 for name in RATES)
        assert first.counts["restarts"] == second.counts["restarts"] == len(restarts)


def test_no_more_requests_are_under_way_than_were_allowed():
    options = dataclasses.replace(OPTIONS, max_concurrency=3)
    faults = Faults({"delay": 1.0}, delay_s=0.02)
    with FakeServer(faults=faults) as first, FakeServer(faults=faults) as second:
        engine = engine_over([first, second], options)
        prompts = [[index, 5] for index in range(30)]
        check(engine.generate(prompts, SAMPLING, list(range(30))), prompts, 0)
        assert first.most_open == second.most_open == 3
        engine.close()


def test_one_of_two_replicas_may_stay_away(tmp_path):
    with FakeServer() as first, FakeServer() as second:
        engine = engine_over([first, second])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        second.stop_listening()
        prompts = [[index, 5] for index in range(40)]
        check(engine.generate(prompts, SAMPLING, list(range(40))), prompts, 1)
        assert first.counts["samples"] >= 40
        engine.close()


def test_a_replica_that_misses_an_update_is_found_before_a_sample_counts(tmp_path):
    with FakeServer() as first, FakeServer(mode="misses 2") as second:
        engine = engine_over([first, second])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        samples = first.counts["samples"] + second.counts["samples"]
        with pytest.raises(RolloutError, match=f"{second.url} answers as with the version before"):
            engine.load_adapter(2, write_effect(tmp_path / "2", effect_of(2)))
        assert first.counts["samples"] + second.counts["samples"] == samples
        # both stay at the version they agree on, and the failed one is gone
        assert engine.health().adapter_version == 1
        assert len(first.loaded) == len(second.loaded) == 1
        engine.close()


def test_a_replica_that_serves_something_else_is_found(tmp_path):
    with FakeServer() as first, FakeServer() as second:
        engine = engine_over([first, second])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        second.base_shift = 0.01
        with pytest.raises(RolloutError, match=r"differ by .* nats a token under one version"):
            engine.load_adapter(2, write_effect(tmp_path / "2", effect_of(2)))
        engine.close()


def test_a_replica_that_never_got_the_adapter_is_found(tmp_path):
    with FakeServer() as first, FakeServer() as second:
        engine = engine_over([first, second])
        second.refusals["/v1/load_lora_adapter"] = (200, "Success")
        with pytest.raises(RolloutError, match=f"{second.url} accepted the adapter .* cannot use"):
            engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_serves_the_base_is_found(kind, tmp_path):
    with FakeServer(kind, mode="ignores_adapters") as server:
        engine = engine_over([server])
        with pytest.raises(RolloutError, match="answers as the base does"):
            engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        engine.close()


def test_an_adapter_that_is_still_zero_is_no_fault(tmp_path):
    with FakeServer(mode="ignores_adapters") as server:
        engine = engine_over([server])
        engine.load_adapter(1, write_effect(tmp_path / "1", 0.0))
        engine.load_adapter(2, write_effect(tmp_path / "2", 0.0))
        engine.close()


def test_replicas_with_different_bases_are_refused():
    with FakeServer() as first, FakeServer() as second:
        second.base_shift = 20.0
        engine = engine_over([first, second])
        with pytest.raises(RolloutError, match="expected one base at all replicas"):
            engine.generate([[1]], SAMPLING, [0])
        engine.close()


def test_a_restarted_replica_that_serves_another_base_is_refused(tmp_path):
    with FakeServer(faults=Faults(restart_at=(3,))) as server:
        engine = engine_over([server])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        server.base_shift = 1.0
        with pytest.raises(RolloutError, match="was restarted and serves version 1 otherwise"):
            engine.generate([[index] for index in range(20)], SAMPLING, list(range(20)))
        engine.close()


def test_scores_are_had_through_faults_and_a_restart(tmp_path):
    with FakeServer() as server:
        engine = engine_over([server])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        # as after a restart
        server.loaded.clear()
        pairs = [([1, 2], [3, 4]), ([5], [6])]
        expected = [
            [
                logprob_of(effect_of(1), len(prompt) + place, token)
                for place, token in enumerate(row)
            ]
            for prompt, row in pairs
        ]
        assert engine.score(pairs) == [pytest.approx(row) for row in expected]
        engine.close()


def test_a_step_ends_at_its_deadline_with_the_reason():
    options = HttpOptions(step_timeout_s=0.5, request_timeout_s=10, progress=False)
    with FakeServer(faults=Faults({"delay": 1.0}, delay_s=5)) as server:
        engine = engine_over([server], options)
        started = time.monotonic()
        with pytest.raises(RolloutError, match=r"step_timeout_s\) are over with 0 of 3 samples"):
            engine.generate([[1], [2], [3]], SAMPLING, [0, 1, 2])
        assert time.monotonic() - started < 4
        engine.close()


def test_slow_answers_end_at_the_requests_deadline():
    options = HttpOptions(
        request_timeout_s=0.2, max_attempts=2, backoff_s=0.01, max_backoff_s=0.01, progress=False
    )
    with FakeServer(faults=Faults({"slow": 1.0}, delay_s=1)) as server:
        engine = engine_over([server], options)
        with pytest.raises(RolloutError, match=r"sample 1 .* after 2 tries: .* no answer in 0.2 s"):
            engine.generate([[1]], SAMPLING, [0])
        engine.close()


def test_a_sample_that_never_comes_right_fails_with_the_reason():
    with FakeServer(faults=Faults({"abort": 1.0})) as server:
        engine = engine_over([server], dataclasses.replace(OPTIONS, max_attempts=4))
        with pytest.raises(RolloutError, match="after 4 tries: the completion ended by 'abort'"):
            engine.generate([[1]], SAMPLING, [0])
        engine.close()


def test_troubles_are_counted_and_said(caplog):
    caplog.set_level(logging.WARNING)
    with FakeServer(faults=Faults({"500": 0.5}, seed=5)) as server:
        engine = engine_over([server])
        engine.generate([[index] for index in range(20)], SAMPLING, list(range(20)))
        assert f"20 samples took {server.counts['500']} more tries" in caplog.text
        engine.close()


def test_a_request_the_server_refuses_is_not_tried_again():
    with FakeServer() as server:
        engine = engine_over([server])
        engine.generate([[1]], SAMPLING, [0])
        before = server.counts["/v1/completions"]
        server.refusals["/v1/completions"] = (400, {"error": {"message": "too long"}})
        with pytest.raises(RolloutError, match="answered 400: too long"):
            engine.generate([[1]], SAMPLING, [0])
        assert server.counts["/v1/completions"] == before + 1
        engine.close()


def test_a_new_version_comes_live_while_an_old_one_is_sampled(tmp_path):
    with FakeServer(faults=Faults({"delay": 1.0}, delay_s=0.2)) as server:
        engine = engine_over([server])
        engine.load_adapter(1, write_effect(tmp_path / "1", effect_of(1)))
        prompts = [[index, 9] for index in range(6)]
        found: list[Rollout] = []
        thread = threading.Thread(
            target=lambda: found.extend(engine.generate(prompts, SAMPLING, list(range(6))))
        )
        thread.start()
        while not server.counts["samples"]:
            time.sleep(0.01)
        for version in (2, 3, 4):
            engine.load_adapter(version, write_effect(tmp_path / str(version), effect_of(version)))
        thread.join()
        check(found, prompts, 1)
        check(engine.generate(prompts, SAMPLING, list(range(6))), prompts, 4)
        engine.close()


def test_a_closed_engine_says_so():
    with FakeServer() as server:
        engine = engine_over([server])
        engine.close()
        with pytest.raises(RolloutError, match="the engine is closed"):
            engine.generate([[1]], SAMPLING, [0])


def test_closing_ends_what_is_under_way():
    with FakeServer(faults=Faults({"delay": 1.0}, delay_s=20)) as server:
        engine = engine_over([server])
        errors: list[RolloutError] = []

        def sample() -> None:
            with pytest.raises(RolloutError, match="was closed while it worked") as failed:
                engine.generate([[1]], SAMPLING, [0])
            errors.append(failed.value)

        thread = threading.Thread(target=sample)
        thread.start()
        while not server.counts["samples"]:
            time.sleep(0.01)
        engine.close()
        thread.join(10)
        assert len(errors) == 1
