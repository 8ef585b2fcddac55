"""The whole way of an adapter: pushed tensors, files, real servers, samples of the local engine."""

import httpx
import pytest
import torch
from running import TARGETS, load, start

from k3tune.errors import ConfigError, RolloutError
from k3tune.lora import LoraSpec, adapter_parameters, adapter_state, attach_lora, save_adapter
from k3tune.rl.engines import LocalEngine
from k3tune.rl.engines.http import HttpOptions
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.replicas_push import PushFolder
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.rollout import Sampling

PROMPTS = [[5, 6, 7], [100, 101], [42], [9, 8, 7, 6, 5, 4]]
SEEDS = list(range(4))
SAMPLING = Sampling(4, temperature=1.2)
# other batches round otherwise, by 2e-5 where it was measured
ROUNDING = 1e-4


@pytest.fixture
def model(folders):
    return attach_lora(load(folders), LoraSpec(targets=TARGETS, rank=2, alpha=4))


def train_a_little(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for group in adapter_parameters(model).values():
            for factor in group.values():
                factor.add_(torch.randn_like(factor), alpha=0.05)


@pytest.fixture(scope="module")
def servers(folders):
    """Two replicas; every test's engine takes its adapters away again."""
    with start(folders, routing=True) as first, start(folders, routing=True) as second:
        yield [first, second]


def test_pushes_give_the_samples_of_the_local_engine(folders, model, servers):
    template = save_adapter(model, folders / "template", base_fingerprint="unknown", overwrite=True)
    push = PushFolder(folders / "adapters" / "pushed", template, dtype=torch.float32)
    moe_layers = tuple(model.get_base_model().model.architecture.moe_layers)
    remote = HttpEngine(
        [server.url for server in servers],
        VllmDialect(moe_layers=moe_layers),
        HttpOptions(progress=False, max_adapters=2),
        push_folder=push,
    )
    local = LocalEngine(model, return_routing=True)
    tensors = adapter_state(model)
    for version in range(4):
        if version:
            train_a_little(model, version)
            tensors = adapter_state(model)
            local.load_adapter(version, tensors)
            remote.load_adapter(version, tensors)
        expected = local.generate(PROMPTS, SAMPLING, SEEDS)
        found = remote.generate(PROMPTS, SAMPLING, SEEDS)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.completion_ids == theirs.completion_ids
            assert mine.adapter_version == theirs.adapter_version == version
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=ROUNDING)
            assert torch.equal(mine.routed_experts, theirs.routed_experts)
    pairs = [(rollout.prompt_ids, rollout.completion_ids) for rollout in found]
    for mine, theirs in zip(remote.score(pairs), local.score(pairs), strict=True):
        assert mine == pytest.approx(theirs, abs=ROUNDING)
    # directories of versions that no server has are gone
    assert len(list((folders / "adapters" / "pushed").iterdir())) == 2
    health = remote.health()
    assert health.adapter_version == 3
    assert health.numerics["dtype"] == "float32" and health.numerics["engine"] == "vllm"
    remote.close()
    assert not list((folders / "adapters" / "pushed").iterdir())


def test_the_base_is_held_against_the_trainers(folders, model, servers):
    remote = HttpEngine([servers[0].url], VllmDialect(), HttpOptions(progress=False))
    pairs = [([5, 6], [7, 8, 9]), ([1], [2, 3])]
    expected = LocalEngine(model).score(pairs)
    assert remote.check_base(pairs, expected) < ROUNDING
    with pytest.raises(RolloutError, match="serve the checkpoint the trainer loads"):
        remote.check_base(pairs, [[-9.0] * 3, [-9.0] * 2])
    remote.close()


def test_a_replica_that_was_given_another_adapter_is_found(folders, model, servers):
    """Behind the client's back: the second replica gets older tensors under the new name."""
    remote = HttpEngine(
        [server.url for server in servers], VllmDialect(), HttpOptions(progress=False)
    )
    remote.load_adapter(1, folders / "adapters" / "one")
    original = httpx.AsyncClient.request

    async def swapped(self, method, path, json=None):
        if path == "/v1/load_lora_adapter" and str(self.base_url).startswith(servers[1].url):
            json = json | {"lora_path": str(folders / "adapters" / "one")}
        return await original(self, method, path, json=json)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.AsyncClient, "request", swapped)
        with pytest.raises(RolloutError, match="it missed the update"):
            remote.load_adapter(2, folders / "adapters" / "two")
    assert remote.health().adapter_version == 1
    remote.close()


def test_layouts_of_servers_are_written(folders, model, tmp_path):
    template = save_adapter(model, tmp_path / "template", base_fingerprint="unknown")
    with pytest.raises(ConfigError, match="layout is 'other'"):
        PushFolder(tmp_path, template, layout="other")
    with pytest.raises(ConfigError, match="is no adapter directory"):
        PushFolder(tmp_path, tmp_path)
    tensors = adapter_state(model)
    first = PushFolder(tmp_path / "pushed", template)
    folder = first.write(1, tensors)
    assert (folder / "adapter_model.safetensors").is_file()
    # a second run leaves it alone
    second = PushFolder(tmp_path / "pushed", template)
    second.remove(folder)
    assert folder.is_dir()
    first.remove(folder)
    assert not folder.exists()
    first.remove(template)
    assert template.is_dir()
    with pytest.raises(RolloutError, match="not finite"):
        key = next(iter(tensors))
        first.write(2, tensors | {key: torch.full_like(tensors[key], torch.nan)})
