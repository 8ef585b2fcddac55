"""Bodies nobody would write: a 4xx and a sentence, or an answer; never a 500, never silence."""

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import start

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
SMALL = st.integers(-2, 4)
KNOWN = {
    "prompt": st.lists(st.integers(-1, 330), max_size=4) | st.text(max_size=6) | JSON,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": JSON}
        ),
        max_size=3,
    )
    | JSON,
    "model": st.sampled_from(["tiny", "one", "other"]) | JSON,
    "max_tokens": SMALL | JSON,
    "temperature": st.floats(-1, 3) | JSON,
    "top_p": st.floats(-1, 2) | JSON,
    "top_k": SMALL | JSON,
    "seed": st.integers() | JSON,
    "stop_token_ids": st.lists(SMALL, max_size=3) | JSON,
    "logprobs": st.just(0) | JSON,
    "prompt_logprobs": st.just(0) | JSON,
    "stream": st.booleans() | JSON,
    "stream_options": st.just({"include_usage": True}) | JSON,
    "tools": JSON,
    "tool_choice": JSON,
    "response_format": JSON,
    "reasoning_effort": JSON,
    "chat_template_kwargs": JSON,
    "request_id": JSON,
    "lora_name": st.sampled_from(["tiny", "one"]) | JSON,
    "lora_path": st.sampled_from(["..", "/etc/passwd", "one/..", "\0", "a" * 5000]) | JSON,
}


def answer_of(client: httpx.Client, path: str, body: Any) -> None:
    response = client.post(path, json=body)
    assert response.status_code < 500, (path, body, response.text)
    if response.status_code >= 400:
        message = response.json()["error"]["message"]
        assert message and "\n" not in message.strip(), (path, body, message)
    assert client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def client(folders):
    """Of a server of its own: an unload may well hit its adapter."""
    with start(
        folders, adapters={"one": folders / "adapters" / "one"}, max_model_len=128
    ) as server:
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as opened:
            yield opened


RIGHT = {
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "chat_template_kwargs": {"thinking": False},
    },
    "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "one"},
    "/v1/unload_lora_adapter": {"lora_name": "one"},
}


BODIES = {
    "path": st.sampled_from(PATHS),
    "body": st.fixed_dictionaries({}, optional=KNOWN) | JSON,
}
CHANGES = {
    "path": st.sampled_from(PATHS),
    "names": st.lists(st.sampled_from(list(KNOWN)), max_size=2),
    "data": st.data(),
}


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@given(**BODIES)
@examples(20)
def test_any_body_is_answered(client, path, body):
    answer_of(client, path, body)


@pytest.mark.slow
@given(**BODIES)
@examples(500)
def test_any_of_many_bodies_is_answered(client, path, body):
    answer_of(client, path, body)


@given(**CHANGES)
@examples(20)
def test_bodies_that_are_wrong_in_one_place_are_answered(client, path, names, data):
    answer_of(client, path, RIGHT[path] | {name: data.draw(KNOWN[name]) for name in names})


@pytest.mark.slow
@given(**CHANGES)
@examples(500)
def test_many_bodies_that_are_wrong_in_one_place_are_answered(client, path, names, data):
    answer_of(client, path, RIGHT[path] | {name: data.draw(KNOWN[name]) for name in names})


@given(content=st.binary(max_size=60), path=st.sampled_from(PATHS))
@examples(15)
def test_any_bytes_are_answered(client, content, path):
    response = client.post(path, content=content)
    assert 400 <= response.status_code < 500
