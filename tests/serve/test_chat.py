"""``/v1/chat/completions``: K3's chat format behind OpenAI's messages."""

import json
from typing import Any

import httpx
import pytest
from running import start
from test_completions import events_of

from command_line import markup_ids
from k3tune.data import K3Tokenizer, render_chat
from k3tune.data.answers import read_answer

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(folders) -> K3Tokenizer:
    return K3Tokenizer.from_pretrained(folders / "base")


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    defaults = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "temperature": 1.5}
    response = client.post("/v1/chat/completions", json=defaults | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_is_the_completion_of_the_rendered_chat(client, tokenizer, thinking):
    prompt = render_chat(
        MESSAGES, tokenizer, thinking=thinking, thinking_effort="high", add_generation_prompt=True
    ).input_ids
    answer = ask(
        client,
        chat_template_kwargs={"thinking": thinking, "thinking_effort": "high"},
        return_token_ids=True,
        logprobs=True,
    )
    assert answer["prompt_token_ids"] == prompt
    body = {"prompt": prompt, "max_tokens": 40, "seed": 3, "temperature": 1.5}
    body |= {"return_token_ids": True, "stop_token_ids": tokenizer.stop_token_ids}
    raw = client.post("/v1/completions", json=body).json()["choices"][0]
    [choice] = answer["choices"]
    assert choice["token_ids"] == raw["token_ids"]
    expected = read_answer(raw["token_ids"], tokenizer, thinking=thinking)
    assert choice["message"]["content"] == expected.content
    assert choice["message"].get("reasoning_content", "") == expected.reasoning
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [
        tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in choice["token_ids"]
    ]
    assert all(entry["logprob"] <= 0 for entry in entries)


def test_a_stream_adds_up_to_the_whole_answer(client):
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "temperature": 1.5}
    whole = ask(client, logprobs=True)["choices"][0]
    events = events_of(client, "/v1/chat/completions", body | {"logprobs": True})
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"]["role"] == "assistant"
    for name in ("content", "reasoning_content"):
        text = "".join(choice["delta"].get(name, "") for choice in choices)
        assert text == whole["message"].get(name, "")
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [e["token"] for e in entries] == [e["token"] for e in whole["logprobs"]["content"]]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


def test_options_of_a_chat_reach_the_prompt(client, tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    options = {"tools": tools, "tool_choice": "required", "response_format": {"type": "text"}}
    answer = ask(client, **options, reasoning_effort="low", return_token_ids=True, max_tokens=1)
    expected = render_chat(
        MESSAGES, tokenizer, **options, thinking_effort="low", add_generation_prompt=True
    )
    assert answer["prompt_token_ids"] == expected.input_ids
    silent = ask(client, reasoning_effort="none", return_token_ids=True, max_tokens=1)
    expected = render_chat(MESSAGES, tokenizer, thinking=False, add_generation_prompt=True)
    assert silent["prompt_token_ids"] == expected.input_ids


CALL = (
    "<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>2'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    "<|end_of_msg|>"
)


@pytest.fixture
def scripted(running, tokenizer, monkeypatch):
    """The server says a tool call, whatever the model would say."""
    from k3tune.rl.engines.continuous import SampledToken

    ids = markup_ids(tokenizer, CALL)

    async def sample(*_: Any):
        for token in ids:
            yield SampledToken(0, token, -0.5, "stop" if token == ids[-1] else None)

    monkeypatch.setattr(running.worker, "sample", sample)


def test_tool_calls_are_read(client, scripted):
    [choice] = ask(client)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "ok"
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2}
    *_, last = events_of(client, "/v1/chat/completions", {"messages": MESSAGES})
    [streamed] = last["choices"][0]["delta"]["tool_calls"]
    assert streamed["function"] == call["function"] and streamed["index"] == 0


REFUSED = {
    "no messages": {"messages": None},
    "messages that are text": {"messages": "Hello"},
    "a role nobody has": {"messages": [{"role": "judge", "content": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "an assistant first": {"messages": [{"role": "assistant", "content": "x"}]},
    "tools that are none": {"tools": [{"type": "function"}]},
    "a tool choice of one tool": {"tool_choice": {"type": "function"}},
    "a format nobody has": {"response_format": {"type": "xml"}},
    "an effort nobody has": {"reasoning_effort": "medium"},
    "an option of another template": {"chat_template_kwargs": {"enable_thinking": True}},
    "other tokens' logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs that are a number": {"logprobs": 1},
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_is_not_usable_is_refused_in_a_sentence(client, body):
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    error = response.json()["error"]
    assert response.status_code == 400 == error["code"]
    assert error["message"] and "\n" not in error["message"]


def test_a_base_without_a_tokenizer_serves_ids_alone(folders):
    with (
        start(folders, tokenizer=False) as server,
        httpx.Client(verify=False, base_url=server.url) as client,
    ):
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "Hello"}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400
            assert "needs a tokenizer" in response.json()["error"]["message"]
        body = {"prompt": [1], "logprobs": 0, "max_tokens": 2}
        choice = client.post("/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert choice["text"] == "" and choice["logprobs"]["tokens"][0].startswith("token_id:")
