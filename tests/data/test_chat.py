"""The chat format, as text: what each kind of message becomes, in which order, and what is trained.

``<|open|>``, ``<|close|>``, ``<|sep|>`` and ``<|end_of_msg|>`` are written ``<``, ``/``, ``>`` and
``.`` below, so that an element reads like markup.
"""

import pytest

from k3tune.data import render_chat
from k3tune.data.errors import DataError
from k3tune.errors import ConfigError

USER = {"role": "user", "content": "Hi"}
SHORT = {"<|open|>": "<", "<|close|>": "</", "<|sep|>": ">", "<|end_of_msg|>": "."}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"b": 1, "a": {"d": 2, "c": 3}}},
}
ADD_SORTED = (
    '[{"function":{"name":"add","parameters":{"a":{"c":3,"d":2},"b":1}},"type":"function"}]'
)


def shown(rendered, trained_only=False) -> str:
    return "".join(
        SHORT[segment.text] if segment.control else segment.text
        for segment in rendered.segments
        if segment.trained or not trained_only
    )


@pytest.fixture
def render(tokenizer):
    def render(*messages, thinking_effort=None, **options):
        return render_chat(messages, tokenizer, thinking_effort=thinking_effort, **options)

    return render


def call(name="add", arguments=None, id=None):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_system_and_user_messages_and_their_names(render):
    rendered = render(
        {"role": "system", "content": "Be brief."}, {**USER, "name": "Ann"}, {**USER, "name": None}
    )
    assert shown(rendered) == (
        '<message role="system">Be brief.</message>.'
        '<message role="user" name="Ann">Hi</message>.'
        '<message role="user">Hi</message>.'
    )
    assert not any(rendered.assistant_mask)


def test_text_is_the_segments_joined(render):
    assert render(USER).text == (
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
    )


def test_attribute_values_are_escaped_and_nothing_else_is(render):
    rendered = render({"role": "user", "name": '&"<>', "content": '&"<>'})
    assert shown(rendered) == '<message role="user" name="&amp;&quot;<>">&"<></message>.'


def test_parts_of_a_content_are_encoded_one_by_one(render):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    rendered = render({"role": "user", "content": parts})
    assert [s.text for s in rendered.segments if s.text in ("Hel", "lo")] == ["Hel", "lo"]
    assert rendered.input_ids != render({"role": "user", "content": "Hello"}).input_ids


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_mode_always_has_a_think_channel_also_in_the_history(render, key):
    rendered = render(
        USER,
        {"role": "assistant", key: "Let me see.", "content": "Yes."},
        USER,
        {"role": "assistant", key: " \n", "content": "No."},
    )
    header = '<message role="assistant">'
    assert shown(rendered) == (
        '<message role="user">Hi</message>.'
        f"{header}<think>Let me see.</think><response>Yes.</response></message>."
        '<message role="user">Hi</message>.'
        f"{header}<think></think><response>No.</response></message>."
    )
    assert shown(rendered, trained_only=True) == (
        "<think>Let me see.</think><response>Yes.</response></message>."
        "<think></think><response>No.</response></message>."
    )


def test_without_thinking_no_turn_has_a_think_channel(render):
    rendered = render(USER, {"role": "assistant", "content": "Yes."}, thinking=False)
    assert "think" not in shown(rendered)
    assert shown(rendered, trained_only=True) == "<response>Yes.</response></message>."


def test_reasoning_is_not_dropped_in_silence(render):
    with pytest.raises(DataError, match=r"message 2 \(assistant\) has reasoning"):
        render(USER, {"role": "assistant", "reasoning": "x", "content": "y"}, thinking=False)


@pytest.mark.parametrize(
    ("thinking", "trained"),
    [(True, "x</think><response>y</response></message>."), (False, "y</response></message>.")],
)
def test_the_opening_tag_that_a_generation_prompt_gives_may_be_masked(render, thinking, trained):
    answer = {"role": "assistant", "content": "y"} | ({"reasoning": "x"} if thinking else {})
    rendered = render(USER, answer, thinking=thinking, train_opening_tag=False)
    assert shown(rendered, trained_only=True) == trained


@pytest.mark.parametrize(("thinking", "channel"), [(True, "think"), (False, "response")])
def test_a_generation_prompt_is_a_prefix_of_the_answered_conversation(render, thinking, channel):
    prompt = render(USER, thinking=thinking, add_generation_prompt=True)
    whole = render(USER, {"role": "assistant", "content": "y"}, thinking=thinking)
    assert shown(prompt).endswith(f'<message role="assistant"><{channel}>')
    assert whole.input_ids[: len(prompt.input_ids)] == prompt.input_ids


def test_tools_come_first_compact_and_sorted_at_every_depth(render):
    rendered = render(USER, tools=[ADD])
    assert shown(rendered).startswith(
        '<message role="system" type="tool-declare"># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n"
        f"```json\n{ADD_SORTED}\n```</message>.<message"
    )


def test_tools_keep_characters_beyond_ascii(render):
    tool = {"name": "f", "description": "é漢"}
    assert '[{"description":"é漢","name":"f"}]' in shown(render(USER, tools=[tool]))


def test_tools_may_be_added_by_a_system_message(render):
    rendered = render(USER, {"role": "system", "tools": [ADD]}, USER)
    assert (
        '.<message role="system" type="tool-declare">## New Tools Available\n'
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n"
        f"```json\n{ADD_SORTED}\n```</message>.<message"
    ) in shown(rendered)


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_the_thinking_effort_follows_the_tools(render, effort):
    rendered = render(USER, tools=[ADD], thinking_effort=effort)
    assert (
        '```</message>.<message role="system" type="thinking-effort">'
        "`thinking_effort` guides on how much to think in your thinking channel (not including "
        "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`.</message>."
        '<message role="user">'
    ) in shown(rendered)


def test_the_thinking_effort_is_max_unless_told_otherwise_and_absent_without_thinking(tokenizer):
    assert "thinking_effort=max" in render_chat([USER], tokenizer).text
    assert "thinking_effort" not in render_chat([USER], tokenizer, thinking_effort=None).text
    assert "thinking_effort" not in render_chat([USER], tokenizer, thinking=False).text


def test_medium_is_named_by_the_text_and_refused_by_the_format(render):
    with pytest.raises(ConfigError, match="'medium', expected low, high, max or None"):
        render(USER, thinking_effort="medium")


def test_tool_calls_carry_typed_arguments_in_the_order_of_the_caller(render):
    arguments = {
        "text": "a <b> é",
        "count": 3,
        "ratio": 0.5,
        "flag": True,
        "nothing": None,
        "list": [1, "é"],
        "map": {"b": 1, "a": [2, 3]},
    }
    asked = call("f&g", arguments), call("stop")
    rendered = render(USER, {"role": "assistant", "tool_calls": asked}, thinking=False)
    assert shown(rendered, trained_only=True) == (
        "<response></response><tools>"
        '<call tool="f&amp;g" index="1">'
        '<argument key="text" type="string">a <b> é</argument>'
        '<argument key="count" type="number">3</argument>'
        '<argument key="ratio" type="number">0.5</argument>'
        '<argument key="flag" type="boolean">true</argument>'
        '<argument key="nothing" type="null">null</argument>'
        '<argument key="list" type="array">[1, "é"]</argument>'
        '<argument key="map" type="object">{"b": 1, "a": [2, 3]}</argument>'
        '</call><call tool="stop" index="2"></call>'
        "</tools></message>."
    )


def test_arguments_may_be_json_text_and_a_call_may_be_flat(render):
    flat = {"name": "add", "arguments": '{"a": 1}'}
    assert (
        render(USER, {"role": "assistant", "tool_calls": [flat]}).segments
        == render(USER, {"role": "assistant", "tool_calls": [call(arguments={"a": 1})]}).segments
    )


@pytest.mark.parametrize("text", ['{"a": ', "a=1", '{"a": NaN}'])
def test_arguments_that_are_no_json_are_read_but_never_taught(render, text):
    rendered = render(USER, {"role": "assistant", "tool_calls": [call(arguments=text)]})
    block = f'<json type="object">{text}</json>'
    assert f'<call tool="add" index="1">{block}</call></tools>' in shown(rendered)
    assert '<call tool="add" index="1"></call></tools>' in shown(rendered, trained_only=True)
    assert rendered.num_unparsed_calls == 1


def test_tool_results_stand_in_the_order_of_the_calls_and_are_counted_in_each_turn(render):
    two = [call("first", id="x"), call("second", id="y")]
    rendered = render(
        USER,
        {"role": "assistant", "tool_calls": two},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "assistant", "tool_calls": [call("third")]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "done"},
    )
    for result in (
        '.<message role="tool" tool="first" index="1">1</message>.'
        '<message role="tool" tool="second" index="2">2</message>.',
        '.<message role="tool" tool="third" index="1">3</message>.',
    ):
        assert result in shown(rendered)
        assert result not in shown(rendered, trained_only=True)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("required", "You MUST call tools in the next message."),
        ("none", "You MUST NOT call any tools in the next message."),
    ],
)
def test_a_tool_choice_follows_the_history(render, choice, sentence):
    rendered = render(USER, tool_choice=choice, add_generation_prompt=True)
    assert (
        'Hi</message>.<message role="system" type="tool-choice">'
        f"The system is invoked with `tool_choice={choice}`.\n{sentence}</message>."
        '<message role="assistant"><think>'
    ) in shown(rendered)
    assert render(USER, tool_choice="auto").segments == render(USER).segments


def test_a_response_format_follows_the_tool_choice(render):
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"b": 1, "a": "é"}}}
    told = (
        "Your response must be raw JSON data without markdown code blocks (```json) or any "
        "additional formatting."
    )
    rendered = render(USER, tool_choice="none", response_format=schema)
    assert shown(rendered).endswith(
        'next message.</message>.<message role="system" type="response-format">'
        f"The system is invoked with `response_format=json_schema`.\n{told}\n"
        "The JSON data must match the following schema:\n"
        '```json\n{"a":"é","b":1}\n```</message>.'
    )
    for wanted in ("json_object", {"type": "json_object"}):
        assert shown(render(USER, response_format=wanted)).endswith(
            f'"response-format">The system is invoked with `response_format=json_object`.\n{told}'
            "</message>."
        )
    assert render(USER, response_format="text").segments == render(USER).segments


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "add"},
        {"response_format": "xml"},
        {"response_format": "json_schema"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
    ],
    ids=str,
)
def test_unknown_options_are_refused(render, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        render(USER, **options)


def test_labels_are_the_ids_where_the_mask_is_one(render):
    rendered = render(USER, {"role": "assistant", "content": "Yes."})
    assert len(rendered.labels) == len(rendered.input_ids) == len(rendered.assistant_mask)
    for label, token, trained in zip(
        rendered.labels, rendered.input_ids, rendered.assistant_mask, strict=True
    ):
        assert label == (token if trained else -100)


def test_loss_may_begin_at_a_later_message(render):
    turn = {"role": "assistant", "content": "old"}, USER, {"role": "assistant", "content": "new"}
    rendered = render(USER, *turn, train_from=2)
    assert shown(rendered, trained_only=True) == (
        "<think></think><response>new</response></message>."
    )
