"""Whatever a caller writes, and wherever, control tokens come from the format alone.

A conversation is rendered twice, once with harmless text in every place that takes any. The ids of
special tokens, in order, must be the same.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import FIRST_SPECIAL, PIECES, SPECIAL_TOKENS

from k3tune.data import render_chat

CONTROL = [*SPECIAL_TOKENS, "<|reserved_token_300|>", "<|", "|>", "open", "&lt;|sep|&gt;"]
markup = st.sampled_from([*CONTROL, '="', '"', "&quot;", *PIECES])
fragments = st.one_of(markup, st.text(max_size=8))
hostile = st.lists(fragments, min_size=1, max_size=4).map("".join).filter(bool)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    hostile,
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=2), st.dictionaries(hostile, scalars, max_size=2)
)


def conversation(text, argument) -> dict:
    """A conversation with ``text()`` in every place that takes text."""
    name = text()
    return {
        "messages": [
            {"role": "system", "content": text(), "name": text()},
            {"role": "user", "content": [{"type": "text", "text": text()}] * 2},
            {
                "role": "assistant",
                "reasoning": "x" + text(),
                "content": text(),
                "tool_calls": [
                    {"function": {"name": name, "arguments": {text(): argument()}}},
                    {"function": {"name": text(), "arguments": f"{{{text()}{{"}},
                ],
            },
            {"role": "tool", "content": text(), "name": name},
            {"role": "tool", "content": text()},
            {"role": "system", "tools": [{"name": text(), text() + "!": argument()}]},
            {"role": "user", "content": text(), "name": text()},
        ],
        "tools": [{"function": {"name": text(), "parameters": {text(): argument()}}}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {text(): argument()}},
        },
        "add_generation_prompt": True,
    }


def special_ids(rendered) -> list[int]:
    return [token for token in rendered.input_ids if token >= FIRST_SPECIAL]


# every example draws some twenty texts
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_text_in_any_place_makes_a_control_token(tokenizer, data):
    harmless = render_chat(**conversation(lambda: "x", lambda: "x"), tokenizer=tokenizer)
    drawn = conversation(lambda: data.draw(hostile), lambda: data.draw(values))
    rendered = render_chat(**drawn, tokenizer=tokenizer)
    assert special_ids(rendered) == special_ids(harmless)
    controls = [tokenizer.control_id(s.text) for s in rendered.segments if s.control]
    assert special_ids(rendered) == controls


@given(hostile)
def test_no_text_makes_a_special_token_outside_a_chat(tokenizer, text):
    for ids in (
        tokenizer.encode_text(text),
        tokenizer.encode_bytes(text.encode()),
        tokenizer(text)["input_ids"],
        tokenizer.encode(text),
    ):
        assert max(ids) < FIRST_SPECIAL


@given(hostile)
def test_an_attribute_ends_where_the_format_ends_it(tokenizer, name):
    rendered = render_chat([{"role": "user", "name": name, "content": ""}], tokenizer)
    texts = [segment.text for segment in rendered.segments]
    before, value, after = texts[-8:-5]
    assert (before, after) == ('="', '"')
    assert '"' not in value
    assert value.replace("&quot;", '"').replace("&amp;", "&") == name
