"""The two dialects against exchanges in the documented schemas of their servers."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3tune.errors import ConfigError
from k3tune.rl.engines.http import CallFailed, HttpOptions, Server, checked_url
from k3tune.rl.engines.http_canary import Probe, find_faults, noise_of
from k3tune.rl.engines.http_dialect import Dialect, Wanted
from k3tune.rl.engines.sglang import SglangDialect
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.rl.rollout import Sampling

BASE_NAME = "moonshotai/Kimi-K3"
SAMPLING = Sampling(8, temperature=0.7, top_p=0.9, top_k=40, stop_token_ids=(2,))
WANTED = Wanted("k3-v7", (11, 12, 13), SAMPLING, 5, "req-1")
MOE_LAYERS = (1, 2, 3)


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def dialect(kind: str) -> Dialect:
    if kind == "vllm":
        return VllmDialect(moe_layers=MOE_LAYERS)
    return SglangDialect(moe_layers=MOE_LAYERS, num_experts_per_token=2)


@pytest.fixture
def recorded(kind: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "exchanges" / f"{kind}.json").read_text())


def test_a_sample_is_asked_for_as_documented(dialect, recorded):
    call = dialect.sample(WANTED, BASE_NAME)
    assert (call.method, call.path) == ("POST", recorded["sample"]["path"])
    assert call.body == recorded["sample"]["body"]


def test_a_sample_is_read_with_its_ids_logprobs_and_experts(dialect, recorded):
    sampled = dialect.read_sample(recorded["sample"]["answer"], WANTED, BASE_NAME)
    assert sampled.completion_ids == (21, 22, 2)
    assert sampled.logprobs == (-0.25, -1.5, -0.125)
    assert sampled.finish_reason == "stop"
    # 6 tokens but the last; the dense layer's row is dropped
    all_layers = torch.arange(5 * 4 * 2).reshape(5, 4, 2) % 7
    assert torch.equal(sampled.routed_experts.long(), all_layers[:, list(MOE_LAYERS)])


def test_the_base_is_asked_for_without_an_adapter(kind, dialect):
    body = dialect.sample(WANTED._replace(model=None), BASE_NAME).body
    assert body["model" if kind == "vllm" else "lora_path"] == (
        BASE_NAME if kind == "vllm" else None
    )


def test_scores_are_asked_for_and_read_as_documented(dialect, recorded):
    case = recorded["score"]
    call = dialect.score(None, case["ids"], BASE_NAME, "req-2")
    assert (call.path, call.body) == (case["path"], case["body"])
    assert dialect.read_scores(case["answer"], case["ids"]) == case["scores"]


def test_facts_are_read(dialect, recorded):
    facts = dialect.read_facts(recorded["facts"]["answers"])
    assert (facts.base, facts.numerics) == (
        recorded["facts"]["base"],
        recorded["facts"]["numerics"],
    )
    assert len(dialect.facts_calls()) == len(recorded["facts"]["answers"])


def test_an_adapter_is_loaded_by_path(dialect, recorded):
    call = dialect.load("k3-v7", "/adapters/v7")
    assert (call.path, call.body) == (recorded["load"]["path"], recorded["load"]["body"])
    dialect.read_load(recorded["load"]["answer"])


async def refused(case: dict[str, Any], dialect: Dialect) -> CallFailed:
    """The failure that a recorded refusal becomes, through the transport."""
    server = Server("http://127.0.0.1:1", HttpOptions())
    transport = httpx.MockTransport(
        lambda request: httpx.Response(case["status"], json=case["body"])
    )
    server._client = httpx.AsyncClient(base_url=server.url, transport=transport)
    call = dialect.load("k3-v7", "/v7") if case["call"] == "load" else dialect.sample(WANTED, "b")
    with pytest.raises(CallFailed) as failed:
        dialect.read_load(await server.call(call))
    await server.close()
    return failed.value


def test_refusals_are_explained(kind, dialect, recorded):
    for case in recorded["refusals"]:
        failure = asyncio.run(refused(case, dialect))
        assert not failure.again, case
        assert dialect.is_loaded_already(failure) == case.get("already_loaded", False), case
        assert dialect.is_missing(failure, "k3-v7") == ("missing" in case), case
        if "says" in case:
            assert case["says"] in dialect.explain(failure, rank=64)


def spoiled(answer: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """A copy of an answer with one value replaced."""
    answer = copy.deepcopy(answer)
    place = answer
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return answer


VLLM_FAULTS = {
    "another request's id": (("id",), "cmpl-other"),
    "another prompt": (("choices", 0, "prompt_token_ids"), [11, 12]),
    "another model": (("model",), BASE_NAME),
    "aborted": (("choices", 0, "finish_reason"), "abort"),
    "cut": (("choices", 0, "finish_reason"), "length"),
    "tokens that are no ids": (("choices", 0, "token_ids"), [21, "22", 2]),
    "a token without logprob": (("choices", 0, "logprobs", "token_logprobs"), [-0.25, -1.5]),
    "a logprob that is none": (("choices", 0, "logprobs", "token_logprobs"), [-0.25, None, -1.0]),
    "no choices": (("choices",), []),
    "experts of too few tokens": (("choices", 0, "token_ids"), [21, 2]),
    "experts that are no base64": (("choices", 0, "routed_experts"), "***"),
}
SGLANG_FAULTS = {
    "another request's id": (("meta_info", "id"), "other"),
    "another prompt": (("prompt_token_ids",), [11, 12]),
    "aborted": (("meta_info", "finish_reason"), {"type": "abort", "message": "x"}),
    "cut": (("meta_info", "finish_reason"), {"type": "length", "length": 8}),
    "other ids": (("output_ids",), [21, 23, 2]),
    "no meta_info": (("meta_info",), None),
    "pairs that are none": (("meta_info", "output_token_logprobs"), [-0.25, -1.5, -0.125]),
    "experts of other tokens": (("meta_info", "routed_experts"), "AAAA"),
}


def test_answers_that_cannot_be_used_are_refused(kind, dialect, recorded):
    answer = recorded["sample"]["answer"]
    for name, (path, value) in (VLLM_FAULTS if kind == "vllm" else SGLANG_FAULTS).items():
        with pytest.raises(CallFailed):
            dialect.read_sample(spoiled(answer, *path, value=value), WANTED, BASE_NAME)
            pytest.fail(f"{name} was accepted")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the whole left out."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in children:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += paths_of(child, (*path, key))
    return found


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_answer_is_read_or_refused(data, dialect, recorded):
    for part, read in (
        ("sample", lambda answer: dialect.read_sample(answer, WANTED, BASE_NAME)),
        ("score", lambda answer: dialect.read_scores(answer, recorded["score"]["ids"])),
    ):
        answer = recorded[part]["answer"]
        path = data.draw(st.sampled_from(paths_of(answer)))
        try:
            read(spoiled(answer, *path, value=data.draw(JSON)))
            read(data.draw(JSON))
        except CallFailed:
            pass


def test_logits_in_the_place_of_logprobs_are_no_trouble_that_passes(recorded, kind, dialect):
    path = ("choices", 0, "logprobs", "token_logprobs")
    if kind == "sglang":
        path = ("meta_info", "output_token_sampling_logprobs")
    answer = spoiled(recorded["sample"]["answer"], *path, value=[12.5, 3.0, 1.0])
    with pytest.raises(CallFailed, match="not logits") as failed:
        dialect.read_sample(answer, WANTED, BASE_NAME)
    assert not failed.value.again


def test_a_stop_at_an_id_nobody_asked_for_is_said(recorded, dialect):
    sampling = Sampling(8, stop_token_ids=(77,))
    answer = recorded["sample"]["answer"]
    with pytest.raises(CallFailed, match=r"stopped at id 2, expected one of \[77\]"):
        dialect.read_sample(answer, WANTED._replace(sampling=sampling), BASE_NAME)


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/proxy/", "https://host/proxy"),
        (" http://[::1]:3 ", "http://[::1]:3"),
    ],
)
def test_addresses_lose_their_ends(url, clean):
    assert checked_url(url) == clean


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://h/?a=b", "http://h:x"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="no address of a server"):
        checked_url(url)


def test_an_address_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ConfigError) as refused_url:
        checked_url("http://me:hunter2@host:1")
    assert "hunter2" not in str(refused_url.value)


@pytest.mark.parametrize(("url", "warned"), [("http://10.0.0.1:1", 1), ("http://localhost:1", 0)])
def test_plain_http_to_another_machine_is_warned_of(url, warned, caplog):
    Server(url, HttpOptions())
    assert len(caplog.records) == warned


@pytest.mark.parametrize(
    "field", ["request_timeout_s", "backoff_s", "max_attempts", "max_adapters", "max_concurrency"]
)
def test_options_out_of_range_are_refused(field):
    with pytest.raises(ConfigError, match=field):
        HttpOptions(**{field: 0})


def test_noise_explains_small_differences_between_replicas():
    base = [[-1.0, -2.0], [-1.001, -2.0]]
    noise = noise_of([base, [[-1.0, -2.001]]])
    new = [Probe("a", base[0], None, [-1.5, -2.0]), Probe("b", base[0], None, [-1.501, -2.0])]
    assert not find_faults(new, noise, changes_the_base=True, changed=True)
    assert find_faults(new, 0.0, changes_the_base=True, changed=True)
