"""The engine over HTTP: versions, names, and what is checked before a sample counts."""

from typing import Any

import pytest
import torch

from k3tune.errors import RolloutError
from k3tune.rl.engines.http import HttpOptions
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.sglang import SglangDialect
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.rollout import RolloutEngine, Sampling
from rollout_servers import BASE, FakeServer, tokens_of, write_effect

QUICK = HttpOptions(
    backoff_s=0.01,
    max_backoff_s=0.05,
    request_timeout_s=10,
    step_timeout_s=30,
    outage_timeout_s=0.3,
    progress=False,
)


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_token_is_sent_and_never_logged(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("K3TUNE_API_TOKEN", "secret-123")
    caplog.set_level("DEBUG")
    with FakeServer() as server:
        engine = HttpEngine([server.url], VllmDialect(), QUICK)
        engine.generate([[1, 2]], Sampling(2), [0])
        engine.close()
        assert all(h["authorization"] == "Bearer secret-123" for h in server.headers)
    assert "secret-123" not in caplog.text


def make_engine(kind: str, *servers: FakeServer, **options: Any) -> HttpEngine:
    dialect = VllmDialect() if kind == "vllm" else SglangDialect()
    return HttpEngine([server.url for server in servers], dialect, options.get("options", QUICK))


def test_an_engine_samples_scores_and_switches_versions(kind, tmp_path):
    with FakeServer(kind) as server:
        engine = make_engine(kind, server)
        assert isinstance(engine, RolloutEngine)
        assert engine.health().adapter_version == 0
        prompts, seeds = [[7, 8], [9, 10, 11]], [1, 2]
        for version, effect in ((0, 0.0), (3, 0.5), (4, 0.0), (5, 0.7)):
            if version:
                engine.load_adapter(version, write_effect(tmp_path / str(version), effect))
            rollouts = engine.generate(prompts, Sampling(5), seeds)
            for rollout, prompt, seed in zip(rollouts, prompts, seeds, strict=True):
                assert rollout.adapter_version == version == engine.health().adapter_version
                assert list(rollout.completion_ids) == tokens_of(effect, prompt, seed, 5)
            scored = engine.score([(r.prompt_ids, r.completion_ids) for r in rollouts])
            assert scored == [pytest.approx(rollout.logprobs) for rollout in rollouts]
        engine.close()
        engine.close()
        assert not server.loaded


def test_names_and_paths_are_never_used_twice(tmp_path):
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        folder = write_effect(tmp_path / "a", 0.5)
        engine.load_adapter(1, folder)
        with pytest.raises(RolloutError, match="fresh directory"):
            engine.load_adapter(2, folder)
        with pytest.raises(RolloutError, match="expected a higher number"):
            engine.load_adapter(1, write_effect(tmp_path / "b", 0.5))
        engine.load_adapter(2, write_effect(tmp_path / "c", 0.6))
        assert len(server.loaded) == len(set(server.loaded)) == 2
        engine.close()


def test_old_versions_are_unloaded(kind, tmp_path):
    with FakeServer(kind) as server:
        engine = make_engine(kind, server)
        for version in range(1, 7):
            engine.load_adapter(version, write_effect(tmp_path / str(version), version / 10))
            assert len(server.loaded) <= QUICK.max_adapters
        assert max(server.loaded.values()) == pytest.approx(0.6)
        engine.close()


def test_tensors_need_a_push_folder():
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        with pytest.raises(RolloutError, match="takes adapters by path"):
            engine.load_adapter(1, {"x": torch.zeros(1)})
        engine.close()


def test_logprobs_without_the_temperature_are_found_out(kind):
    with FakeServer(kind, mode="raw") as server:
        engine = make_engine(kind, server)
        assert engine.generate([[1, 2]], Sampling(4), [0])
        with pytest.raises(RolloutError, match="before the temperature"):
            engine.generate([[1, 2]], Sampling(4, temperature=0.7), [0])
        engine.close()


def test_logprobs_with_the_temperature_are_accepted(kind):
    with FakeServer(kind) as server:
        engine = make_engine(kind, server)
        engine.generate([[1, 2]], Sampling(4, temperature=0.7), [0])
        engine.close()


def test_another_base_than_the_trainers_is_refused():
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        pairs = [([1, 2], [3, 4])]
        right = engine.score(pairs)
        assert engine.check_base(pairs, right) == 0
        with pytest.raises(RolloutError, match=r"differs from the trainer's by 1\.000 nats"):
            engine.check_base(pairs, [[value - 1 for value in right[0]]])
        engine.close()


def test_a_server_that_is_not_up_is_named():
    with FakeServer() as server:
        url = server.url
    engine = HttpEngine([url], VllmDialect(), QUICK)
    with pytest.raises(RolloutError, match="no server has answered for"):
        engine.generate([[1]], Sampling(2), [0])
    with pytest.raises(RolloutError, match=f"{url} is not up"):
        engine.health()
    engine.close()


def test_a_refused_adapter_leaves_the_version_before_live(kind, tmp_path):
    path = "/v1/load_lora_adapter" if kind == "vllm" else "/load_lora_adapter"
    with FakeServer(kind) as server:
        engine = make_engine(kind, server)
        engine.load_adapter(1, write_effect(tmp_path / "1", 0.5))
        server.refusals[path] = (400, {"error": {"message": "rank: see max_lora_rank"}})
        with pytest.raises(RolloutError, match="rank is 32: raise --max-lora-rank"):
            engine.load_adapter(2, write_effect(tmp_path / "2", 0.6, rank=32))
        server.refusals.clear()
        assert engine.health().adapter_version == 1
        assert engine.generate([[1]], Sampling(2), [0])[0].adapter_version == 1
        engine.load_adapter(2, write_effect(tmp_path / "3", 0.6))
        engine.close()


def test_processes_of_a_run_share_what_the_first_one_loads(tmp_path):
    """The others adopt its versions: one name at the server, samples of one version everywhere."""
    with FakeServer() as server:
        first, other = make_engine("vllm", server), make_engine("vllm", server)
        for version, effect in ((1, 0.5), (2, 0.6)):
            first.load_adapter(version, write_effect(tmp_path / str(version), effect))
            other.adopt(version, *first.live_adapter)
            [mine] = first.generate([[1]], Sampling(4), [0])
            [theirs] = other.generate([[1]], Sampling(4), [0])
            assert mine == theirs and theirs.adapter_version == version
        assert len(server.loaded) == 2
        # its names are not the other's to remove
        other.close()
        assert len(server.loaded) == 2
        first.close()
        assert not server.loaded


def test_an_adapter_nobody_loaded_cannot_be_adopted(tmp_path):
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        with pytest.raises(RolloutError, match="cannot use it"):
            engine.adopt(1, "nobody", write_effect(tmp_path / "1", 0.5))
        assert engine.health().adapter_version == 0
        engine.close()


def test_what_is_no_adapter_is_refused_before_any_server_is_asked(tmp_path):
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        with pytest.raises(RolloutError, match="is no adapter directory"):
            engine.load_adapter(1, tmp_path)
        assert not server.counts["/v1/load_lora_adapter"]
        engine.close()


def test_the_fake_servers_base_is_the_engines():
    with FakeServer() as server:
        engine = make_engine("vllm", server)
        engine.generate([[1]], Sampling(2), [0])
        assert server.bodies[0]["model"] == BASE
        engine.close()
