"""``/v1/completions``: the tokens of the local engine, in vLLM's fields."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from running import load

from k3tune.lora import load_adapter
from k3tune.model.scoring import score_rows
from k3tune.rl.engines import LocalEngine
from k3tune.rl.rollout import Rollout, Sampling

PROMPTS = [[5, 6, 7], [100, 101], [42], [9, 8, 7, 6, 5, 4]]
# One row at a time here, four together there: their products round differently, by 2.1e-5 where it
# was measured.
ROUNDING = 1e-4
SAMPLINGS = {
    "plain": Sampling(8),
    "hot": Sampling(8, temperature=1.7),
    "cut": Sampling(8, temperature=0.8, top_p=0.9, top_k=20),
}


@pytest.fixture(scope="module")
def local(folders: Path) -> LocalEngine:
    """The local engine over base and adapter ``one``."""
    model = load_adapter(load(folders), folders / "adapters" / "one")
    engine = LocalEngine(model, return_routing=True)
    engine.load_adapter(1, folders / "adapters" / "one")
    return engine


@pytest.fixture(scope="module")
def base_engine(folders: Path) -> LocalEngine:
    return LocalEngine(load(folders))


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    defaults = {"max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    response = client.post("/v1/completions", json=defaults | body)
    assert response.status_code == 200, response.text
    return response.json()


def fields(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


@pytest.mark.parametrize(
    ("model", "sampling"),
    [("tiny", "plain"), ("one", "hot"), ("one", "cut")],
)
def test_tokens_are_the_local_engines_for_the_same_seeds(
    client, local, base_engine, model, sampling
):
    sampling = SAMPLINGS[sampling]
    engine = local if model == "one" else base_engine
    expected: list[Rollout] = engine.generate(PROMPTS, sampling, [3, 1, 4, 1])
    for prompt, seed, rollout in zip(PROMPTS, [3, 1, 4, 1], expected, strict=True):
        answer = ask(client, model=model, prompt=prompt, seed=seed, **fields(sampling))
        [choice] = answer["choices"]
        assert answer["model"] == model
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == list(rollout.completion_ids)
        assert choice["finish_reason"] == rollout.finish_reason
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(rollout.logprobs, abs=ROUNDING)


def test_routed_experts_are_the_local_engines(client, local):
    [rollout] = local.generate([[5, 6, 7]], Sampling(6), [0])
    choice = ask(client, model="one", prompt=[5, 6, 7], max_tokens=6, seed=0)["choices"][0]
    array = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    num_tokens = 3 + len(rollout.completion_ids)
    assert array.shape == (num_tokens - 1, 3, 2) and array.dtype == np.uint8
    # layer 0 is dense
    assert not array[:, 0].any()
    assert torch.equal(torch.from_numpy(array[:, 1:]).short(), rollout.routed_experts)


@pytest.mark.parametrize("model", ["tiny", "one"])
def test_prompt_logprobs_score_the_prompt(client, folders, model):
    net = load(folders)
    if model == "one":
        load_adapter(net, folders / "adapters" / "one")
    row = [5, 6, 7, 8, 9]
    [expected] = score_rows(net, [row])
    answer = ask(client, model=model, prompt=row, prompt_logprobs=0, max_tokens=1)
    first, *entries = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    found = [entry[str(token)]["logprob"] for token, entry in zip(row[1:], entries, strict=True)]
    assert found == pytest.approx(expected[1:], abs=ROUNDING)


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_adds_up_to_the_whole_answer(client):
    body = {"prompt": "Hello user", "max_tokens": 20, "seed": 5, "logprobs": 0}
    body |= {"return_token_ids": True, "temperature": 1.5}
    whole = ask(client, **body)
    *events, last = events_of(
        client, "/v1/completions", body | {"stream_options": {"include_usage": True}}
    )
    choices = [event["choices"][0] for event in events]
    [choice] = whole["choices"]
    assert "".join(part["text"] for part in choices) == choice["text"]
    assert [token for part in choices for token in part["token_ids"]] == choice["token_ids"]
    logprobs = [value for part in choices for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=ROUNDING)
    assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [part["finish_reason"] for part in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_text_and_its_ids_are_one_prompt(client):
    by_text = ask(client, prompt="Hello", seed=1)["choices"][0]
    by_ids = ask(client, prompt=by_text["prompt_token_ids"], seed=1)["choices"][0]
    in_a_list = ask(client, prompt=["Hello"], seed=1)["choices"][0]
    assert by_text == by_ids == in_a_list


def test_a_temperature_of_zero_takes_the_likeliest_token(client, folders):
    choice = ask(client, prompt=[5, 6], temperature=0, max_tokens=1)["choices"][0]
    with torch.no_grad():
        logits = load(folders)(torch.tensor([[5, 6]])).logits[0, -1]
    assert choice["token_ids"] == [int(logits.argmax())]
    assert choice["logprobs"]["token_logprobs"] == [0.0]


def test_stop_ids_are_added_to_the_bases_own(client):
    free = ask(client, prompt=[5], seed=2, ignore_eos=True)["choices"][0]
    stop = free["token_ids"][3]
    first = free["token_ids"].index(stop)
    stopped = ask(client, prompt=[5], seed=2, ignore_eos=True, stop_token_ids=[stop])["choices"][0]
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert free["finish_reason"] == "length" and free["stop_reason"] is None


def test_without_a_seed_answers_differ(client):
    answers = [ask(client, prompt=[5], max_tokens=12, ignore_eos=True) for _ in range(2)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 2


def test_the_request_id_comes_back(client):
    assert ask(client, prompt=[5], request_id="mine-1")["id"] == "cmpl-mine-1"


def test_models_are_listed_with_their_parents(client, folders):
    base, one = client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("tiny", None)
    assert (one["id"], one["parent"]) == ("one", "tiny")
    assert one["root"] == str(folders / "adapters" / "one")


def test_what_a_floor_depends_on_is_told(client):
    numerics = client.get("/version").json()
    assert numerics["dtype"] == "float32" and numerics["activations"] == "none"


REFUSED = {
    "no prompt": {},
    "an empty prompt": {"prompt": []},
    "an empty text": {"prompt": ""},
    "two prompts": {"prompt": [[1], [2]]},
    "an id outside the vocabulary": {"prompt": [1, 320]},
    "a negative id": {"prompt": [-1]},
    "an id that is a boolean": {"prompt": [True]},
    "a prompt that is too long": {"prompt": [1] * 1024},
    "more tokens than there is room for": {"prompt": [1], "max_tokens": 1024},
    "no tokens": {"prompt": [1], "max_tokens": 0},
    "a temperature below 0": {"prompt": [1], "temperature": -1},
    "a temperature that overflows": {"prompt": [1], "temperature": 1e-300},
    "a top-p of 0": {"prompt": [1], "top_p": 0},
    "a top-k below -1": {"prompt": [1], "top_k": -2},
    "a stop id outside": {"prompt": [1], "stop_token_ids": [999]},
    "a seed that is too large": {"prompt": [1], "seed": 2**64},
    "logprobs of other tokens": {"prompt": [1], "logprobs": 5},
    "several answers": {"prompt": [1], "n": 2},
    "stop texts": {"prompt": [1], "stop": ["x"]},
    "penalties": {"prompt": [1], "presence_penalty": 0.5},
    "a field nobody knows": {"prompt": [1], "logit_biases": 1},
    "a stream that is no boolean": {"prompt": [1], "stream": "yes"},
    "scores in a stream": {"prompt": [1], "stream": True, "prompt_logprobs": 0},
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_is_not_usable_is_refused_in_a_sentence(client, body):
    response = client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 == error["code"]
    assert error["message"] and "\n" not in error["message"]


def test_a_model_nobody_serves_is_not_found(client):
    response = client.post("/v1/completions", json={"prompt": [1], "model": "other"})
    assert response.status_code == 404
    assert "'other' does not exist" in response.json()["error"]["message"]


def test_labels_of_the_callers_are_accepted(client):
    ask(client, prompt=[1], user="me", metadata={"a": 1}, n=1, stop=None, presence_penalty=0)
