"""Conversations that are not valid: one sentence names the message and what was expected."""

import pytest

from k3tune.data.errors import DataError, Problem
from k3tune.data.messages import read_conversation, read_tools

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes."}
SYSTEM = {"role": "system", "content": "Be brief."}


def calling(*ids):
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(id=None, **more):
    return {"role": "tool", "content": "1", **({"tool_call_id": id} if id else {}), **more}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER, ANSWER],
        [USER, ANSWER, USER, ANSWER],
        [USER, USER, SYSTEM, ANSWER],
        [USER, calling("a")],
        [USER, calling("a", "b"), result("b"), result("a"), SYSTEM, ANSWER],
        [USER, calling("a"), result("a"), calling("a"), result("a"), ANSWER],
        [USER, {**ANSWER, "tool_calls": []}],
        [USER, {**ANSWER, "tool_calls": None, "name": None, "reasoning": None}],
    ],
    ids=range(9),
)
def test_valid_orders(messages):
    assert len(read_conversation(messages)) == len(messages)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([ANSWER], "message 1 .assistant. comes before any user message"),
        ([SYSTEM, ANSWER], "message 2 .assistant. comes before any user message"),
        ([USER, ANSWER, ANSWER], "message 3 .assistant. follows an assistant message"),
        ([USER, ANSWER, SYSTEM, ANSWER], "message 4 .assistant. follows an assistant message"),
        ([USER, result()], "message 2 .tool. is a tool result without a call"),
        ([USER, ANSWER, result()], "message 3 .tool. is a tool result without a call"),
        ([USER, calling("a"), result(), result()], "message 4 .tool. is a tool result without"),
        ([USER, calling("a"), USER], "message 3 .user. comes before the results of all tool calls"),
        ([USER, calling("a", "b"), result(), ANSWER], "message 4 .*1 missing"),
        ([USER, calling("a", "b"), result("a")], "message 3 .tool. is the last of 1 results for 2"),
        ([USER, calling("a"), SYSTEM, result()], "message 3 .system. comes before the results"),
        ([USER, calling("a"), result("z")], "message 3 .tool. answers the call 'z', expected one"),
        ([USER, calling("a", "b"), result("a"), result("a")], "message 4 .tool. .*a second time"),
    ],
    ids=str,
)
def test_roles_out_of_order(messages, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        read_conversation(messages)
    assert caught.value.problem is Problem.ROLE_ORDER


@pytest.mark.parametrize("messages", [[USER, ANSWER], [USER, calling("a")], [SYSTEM]], ids=str)
def test_a_generation_prompt_needs_somebody_to_answer(messages):
    with pytest.raises(DataError, match="the generation prompt"):
        read_conversation(messages, answer_follows=True)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is an empty list"),
        ("Hi", "messages is a str"),
        (["Hi"], "message 1 is a str, expected an object with a role"),
        ([{"content": "Hi"}], "message 1 has role None, expected one of system, user"),
        ([{"role": "developer", "content": "Hi"}], "message 1 has role 'developer'"),
        ([{**USER, "contnet": "x"}], "message 1 .user. has the unknown key 'contnet'"),
        ([{**USER, "tool_calls": []}], "message 1 .user. has the unknown key 'tool_calls'"),
        ([{"role": "user"}], "message 1 .user. has no content"),
        ([{"role": "user", "content": None}], "message 1 .user. has no content"),
        ([USER, {"role": "assistant", "reasoning": "x"}], "message 2 .assistant. has no content"),
        ([{"role": "user", "content": 3}], "the content is a int, expected text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "text only"),
        ([{"role": "user", "content": ["x"]}], "content part 'x'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "a text part is a int"),
        ([{**USER, "name": ""}], "name is '', expected a text that is not empty"),
        ([{**SYSTEM, "tools": [{"name": "f"}]}], "tools beside content"),
        ([USER, {**ANSWER, "reasoning": 3}], "the reasoning is a int"),
        ([USER, {**ANSWER, "reasoning": "a", "reasoning_content": "b"}], "differ"),
        ([USER, calling("a"), result("a", name="g")], "has name 'g', expected 'fa'"),
        ([USER, calling("a", "b"), result("a"), result()], "1 of 2 results have a tool_call_id"),
    ],
    ids=str,
)
def test_messages_that_are_not_valid(messages, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        read_conversation(messages)
    assert caught.value.problem is Problem.INVALID_MESSAGE


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ("f", "tool_calls is a str"),
        (["f"], "call 1 is a str"),
        ([{"function": "f"}], "call 1: function is a str"),
        ([{"function": {"arguments": {}}}], "call 1 has no name"),
        ([{"type": "code", "function": {"name": "f"}}], "call 1 has type 'code'"),
        ([{"index": 0, "function": {"name": "f"}}], "unknown key 'index'"),
        ([{"function": {"name": "f", "parameters": {}}}], "unknown key 'parameters'"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "the arguments are a list"),
        ([{"function": {"name": "f", "arguments": 3}}], "the arguments are a int"),
        ([{"function": {"name": "f", "arguments": {1: 2}}}], "argument name 1 is no text"),
    ],
    ids=str,
)
def test_tool_calls_that_are_not_valid(calls, sentence):
    with pytest.raises(DataError, match=f"message 2 .assistant..*{sentence}"):
        read_conversation([USER, {"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("tools", [{"name": "f"}, "f", [{}], [{"function": {}}], ["f"]], ids=str)
def test_tools_that_are_not_valid(tools):
    with pytest.raises(DataError, match="tools") as caught:
        read_tools(tools, "tools")
    assert caught.value.problem is Problem.INVALID_TOOL_JSON
