"""Rollouts ahead of time: handed out once, with the version they were sampled from."""

import logging

import pytest

from k3tune.arguments import RolloutArguments
from k3tune.errors import ConfigError
from k3tune.rl import K3GRPOTrainer, build_engine, trainer_class
from k3tune.rl.engines.http import HttpOptions
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.overlap import LookAhead, OverlappedEngine, OverlappedGRPOTrainer, with_next
from k3tune.rl.rollout import RolloutEngine, Sampling
from rollout_servers import FakeServer, tokens_of, write_effect
from tiny_run import adapted

SAMPLING = Sampling(4)
BATCHES = [[[step, place] for place in range(4)] for step in range(5)]
SEEDS = [1, 2, 3, 4]


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture
def engine(server):
    inner = HttpEngine([server.url], VllmDialect(), HttpOptions(progress=False))
    overlapped = OverlappedEngine(inner)
    yield overlapped
    overlapped.close()


def test_it_is_an_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.health().adapter_version == 0
    assert len(engine.score([([1, 2], [3])])[0]) == 1


def test_a_run_is_one_version_behind_and_says_so(engine, server, tmp_path):
    lags = []
    for step, (batch, following) in enumerate(with_next(BATCHES)):
        rollouts = engine.generate(batch, SAMPLING, SEEDS)
        if following is not None:
            engine.prefetch(following, SAMPLING, SEEDS)
        version = step + 1
        engine.load_adapter(version, write_effect(tmp_path / str(version), version / 4))
        sampled_from = {rollout.adapter_version for rollout in rollouts}
        assert len(sampled_from) == 1
        lags.append(step - sampled_from.pop())
        # the version says from which weights the tokens came
        for rollout, prompt, seed in zip(rollouts, batch, SEEDS, strict=True):
            effect = rollout.adapter_version / 4
            assert list(rollout.completion_ids) == tokens_of(effect, prompt, seed, 4)
    assert lags == [0, 1, 1, 1, 1]
    assert engine.num_prefetched == 16 and engine.num_discarded == 0
    # nothing was sampled twice
    assert server.counts["samples"] == 20


def test_samples_that_are_too_old_are_thrown_away(engine, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    engine.generate(BATCHES[0], SAMPLING, SEEDS)
    engine.prefetch(BATCHES[1], SAMPLING, SEEDS)
    for version in (1, 2):
        # not before the prefetch has begun
        engine.score([([1], [2])])
        engine.load_adapter(version, write_effect(tmp_path / str(version), version / 4))
    rollouts = engine.generate(BATCHES[1], SAMPLING, SEEDS)
    assert {rollout.adapter_version for rollout in rollouts} == {2}
    assert engine.num_discarded == 4
    assert "2 versions old, at most 1" in caplog.text


def test_what_nobody_asks_for_is_counted(engine, caplog):
    engine.prefetch(BATCHES[0], SAMPLING, SEEDS)
    rollouts = engine.generate(BATCHES[1], SAMPLING, SEEDS)
    assert [list(rollout.prompt_ids) for rollout in rollouts] == BATCHES[1]
    engine.prefetch(BATCHES[0], SAMPLING, SEEDS)
    engine.prefetch(BATCHES[2], SAMPLING, SEEDS)
    assert engine.num_discarded == 8 and engine.num_prefetched == 0


def test_what_was_handed_out_is_not_handed_out_again(engine, server):
    engine.prefetch(BATCHES[0], SAMPLING, SEEDS)
    first = engine.generate(BATCHES[0], SAMPLING, SEEDS)
    again = engine.generate(BATCHES[0], SAMPLING, SEEDS)
    assert [r.completion_ids for r in first] == [r.completion_ids for r in again]
    assert server.counts["samples"] == 8


@pytest.mark.parametrize("sampling", [Sampling(5), Sampling(4, temperature=1.5)])
def test_other_sampling_is_another_request(engine, sampling):
    engine.prefetch(BATCHES[0], SAMPLING, SEEDS)
    engine.generate(BATCHES[0], sampling, SEEDS)
    assert engine.num_prefetched == 0


def test_engines_in_this_process_are_refused():
    with pytest.raises(ConfigError, match="expected an engine over HTTP"):
        OverlappedEngine(object())


def test_an_option_asks_for_it(base_folder, server, tmp_path):
    served = {"engine": "k3tune", "engine_urls": [server.url], "on_stale_version": "correct"}
    for overlap, trainer in ((True, OverlappedGRPOTrainer), (False, K3GRPOTrainer)):
        rollout = RolloutArguments(**served, overlap=overlap)
        engine = build_engine(rollout, adapted(base_folder), tmp_path)
        assert isinstance(engine, OverlappedEngine if overlap else HttpEngine)
        assert trainer_class(rollout) is trainer
        engine.close()


def test_no_lag_is_no_overlap(engine):
    with pytest.raises(ConfigError, match="max_lag is 0"):
        OverlappedEngine(engine._engine, max_lag=0)


def test_items_come_with_the_one_after():
    assert list(with_next("abc")) == [("a", "b"), ("b", "c"), ("c", None)]
    assert list(with_next([])) == []


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batches_are_taken_once_and_in_order(count):
    ahead, taken = LookAhead(), []
    for epoch in (range(10), range(10, 14)):
        iterator = iter(epoch)
        while True:
            now, following = ahead.take(iterator, count)
            if not now:
                break
            taken += now
            end = min(taken[-1] + 1 + count, epoch.stop)
            assert following == list(range(taken[-1] + 1, end))
    assert taken == list(range(14))
