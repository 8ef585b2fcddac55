"""Generated ids back into reasoning, content and tool calls, and what is said of bad markup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tune.data import render_chat
from k3tune.data.answers import AnswerReader, parse_answer, read_answer

QUESTION = {"role": "user", "content": "Hello world"}
CONTROL = {"<o>": "<|open|>", "<c>": "<|close|>", "<s>": "<|sep|>", "<e>": "<|end_of_msg|>"}
THINK_END = "<c>think<s>"
RESPONSE = "<o>response<s>"
RESPONSE_END = "<c>response<s>"
END = "<c>message<s><e>"


def ids_of(tokenizer, text):
    """Ids of markup written with short names of the control tokens; ``<[EOS]>`` is that token."""
    ids = []
    for word in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
        if word in CONTROL:
            ids.append(tokenizer.control_id(CONTROL[word]))
        elif word.startswith("<["):
            ids.append(tokenizer.control_id(word[1:-1]))
        else:
            ids += tokenizer.encode_text(word)
    return ids


def generated(tokenizer, message, **options):
    """The ids a model would generate to say ``message``."""
    prompt = render_chat([QUESTION], tokenizer, add_generation_prompt=True, **options).input_ids
    whole = render_chat([QUESTION, message], tokenizer, **options).input_ids
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def read(tokenizer, text, **options):
    return read_answer(ids_of(tokenizer, text), tokenizer, **options)


def call(name="search", arguments=None):
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


MESSAGES = [
    {"role": "assistant", "content": "Hi"},
    {
        "role": "assistant",
        "content": "漢字 <|sep|> [EOS]\n",
        "reasoning_content": "so: 1 < 2 & 'x'",
    },
    {"role": "assistant", "content": "", "tool_calls": [call()]},
    {
        "role": "assistant",
        "content": "looking",
        "reasoning_content": "two",
        "tool_calls": [
            call('a "quoted" & name', {"q": "raw &quot; text", "": None, "n": [1, {"a": True}]}),
            call("b", {"x": 1.5, "y": {}, "z": False, 'k"': "1"}),
        ],
    },
]


@pytest.mark.parametrize("message", MESSAGES, ids=["plain", "thought", "empty call", "two calls"])
def test_an_answer_comes_back_as_the_message_that_was_rendered(tokenizer, message):
    answer = parse_answer(generated(tokenizer, message), tokenizer)
    assert answer is not None and answer.ended and answer.malformed == ()
    assert answer.message == message


def test_without_thinking_the_response_channel_is_open_from_the_start(tokenizer):
    ids = generated(tokenizer, MESSAGES[2], thinking=False)
    assert parse_answer(ids, tokenizer, thinking=False).message == MESSAGES[2]
    assert parse_answer(ids, tokenizer) is None


@given(
    content=st.text(),
    reasoning=st.text(min_size=1).filter(str.strip),
    arguments=st.dictionaries(
        st.text(),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        )
        | st.text(),
        max_size=3,
    ),
)
def test_any_answer_comes_back(tokenizer, content, reasoning, arguments):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    message["tool_calls"] = [call("f", arguments)]
    answer = parse_answer(generated(tokenizer, message), tokenizer)
    assert answer is not None and answer.message == message


@given(st.lists(st.integers(256, 279) | st.integers(0, 279), max_size=40))
def test_any_ids_can_be_read_and_are_exact_only_if_they_render_again(tokenizer, ids):
    read_answer(ids, tokenizer, thinking=False)
    answer = parse_answer(ids, tokenizer)
    if answer is not None and not answer.tool_calls and answer.reasoning.strip():
        again = generated(tokenizer, answer.message)
        assert tokenizer.decode_bytes(again) == tokenizer.decode_bytes(ids)


def test_spelled_markup_is_text(tokenizer):
    spelled = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    answer = read_answer(tokenizer.encode_text(spelled), tokenizer, thinking=False)
    assert (answer.content, answer.ended, answer.malformed) == (spelled, False, ())


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("so 1", "so 1", ""),
        ("so<c>thi", "so", ""),
        (f"so{THINK_END}{RESPONSE}Hel", "so", "Hel"),
        (f"so{THINK_END}{RESPONSE}Hello{RESPONSE_END}<o>tools<s><o>call", "so", "Hello"),
    ],
)
def test_a_cut_answer_has_what_came_before_the_cut(tokenizer, text, reasoning, content):
    answer = read(tokenizer, text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert not answer.ended and answer.malformed == () and answer.tool_calls == ()
    assert parse_answer(ids_of(tokenizer, text), tokenizer) is None


def test_a_cut_answer_has_the_calls_that_are_complete(tokenizer):
    begun = '<o>call tool="b" index="2"<s><o>argument key="x" type="string"<s>v'
    answer = read(
        tokenizer,
        f'{THINK_END}{RESPONSE}{RESPONSE_END}<o>tools<s><o>call tool="a" index="1"<s><c>call<s>'
        f"{begun}",
    )
    assert [call.name for call in answer.tool_calls] == ["a"] and answer.malformed == ()


def whole(body):
    return f"{THINK_END}{RESPONSE}{RESPONSE_END}<o>tools<s>{body}<c>tools<s>{END}"


def one_call(argument):
    return whole(f'<o>call tool="f" index="1"<s>{argument}<c>call<s>')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"x{THINK_END}{END}", "the channels are think, expected think, response"),
        (f"x{RESPONSE_END}{END}", "'response' is closed and was not open"),
        (f"x{RESPONSE}y{RESPONSE_END}{THINK_END}{END}", "response stands inside think"),
        (f"x{THINK_END} {RESPONSE}y{RESPONSE_END}{END}", "the text ' ' stands outside"),
        (f"{THINK_END}{RESPONSE}y{RESPONSE_END}{THINK_END}{END}", "'think' is closed and was not"),
        (f"{THINK_END}{RESPONSE}y<e>", "<|end_of_msg|> comes before response is closed"),
        (f"{THINK_END}{RESPONSE}y<c>message<s><e>", "message is closed before response"),
        (f"{THINK_END}{RESPONSE}y<s>{RESPONSE_END}{END}", "a <|sep|> stands outside a tag"),
        (f"{THINK_END}<o>respo<o>response<s>{RESPONSE_END}{END}", "comes before the <|sep|>"),
        (f'{THINK_END}<o>response a="b"<s>{RESPONSE_END}{END}', "response has attributes"),
        (f"{THINK_END}<o>response a<s>{RESPONSE_END}{END}", "not of the form name key"),
        (f'{THINK_END}<o>response a="" a=""<s>{RESPONSE_END}{END}', "gives an attribute twice"),
        (f"{THINK_END}{RESPONSE}{RESPONSE_END}{END}y", "there are tokens after the end"),
        (f"{THINK_END}{RESPONSE}<[PAD]>{RESPONSE_END}{END}", "the special token [PAD]"),
        (f"{THINK_END}{RESPONSE}{RESPONSE_END}<c>message<s><o>x<s><c>x<s><e>", "x stands after"),
        (whole(""), "tools holds no call"),
        (whole("<o>x<s><c>x<s>"), "call 1 is 'x' of the tool ''"),
        (whole('<o>call tool="f" index="2"<s><c>call<s>'), 'expected index="1"'),
        (one_call('<o>json type="object"<s>{}<c>json<s>'), "its arguments as one JSON text"),
        (one_call("<o>argument<s><c>argument<s>"), "expected arguments with a key"),
        (one_call('<o>argument key="k" type="number"<s>x<c>argument<s>'), "is no JSON"),
        (one_call('<o>argument key="k" type="number"<s>NaN<c>argument<s>'), "NaN is not JSON"),
        (one_call('<o>argument key="k" type="number"<s>true<c>argument<s>'), "has type 'number'"),
        (one_call('<o>argument key="k" type="text"<s>1<c>argument<s>'), "has type 'text'"),
        (one_call('<o>argument key="k"<s>1<c>argument<s>'), "expected key, type"),
        (one_call('<o>argument key="k" type="null"<s>null<c>argument<s>' * 2), "'k' twice"),
    ],
)
def test_what_is_malformed_is_said(tokenizer, text, said):
    answer = read(tokenizer, text)
    assert any(said in sentence for sentence in answer.malformed), answer.malformed
    assert parse_answer(ids_of(tokenizer, text), tokenizer) is None


def test_a_malformed_argument_is_kept_as_its_text(tokenizer):
    answer = read(tokenizer, one_call('<o>argument key="k" type="number"<s>one<c>argument<s>'))
    assert answer.tool_calls[0].arguments == {"k": "one"}


def test_an_answer_that_ends_like_a_text_is_cut(tokenizer):
    answer = read(tokenizer, f"{THINK_END}{RESPONSE}y<[EOS]>")
    assert answer.content == "y" and not answer.ended
    assert answer.malformed == ("the special token [EOS] is no part of an answer",)


def test_bytes_that_are_no_utf8_are_replaced_and_said(tokenizer):
    answer = read_answer([0xFF, ord("a")], tokenizer)
    assert answer.reasoning == "\ufffda"
    assert answer.malformed == ("there are bytes that are no UTF-8",)


def test_reading_token_by_token_gives_whole_characters_by_channel(tokenizer):
    reader = AnswerReader(tokenizer)
    ids = ids_of(tokenizer, f"é{THINK_END}{RESPONSE}漢字ü{RESPONSE_END}{END}")
    pieces = [piece for token in ids if (piece := reader.feed(token))]
    assert pieces == [("think", "é"), ("response", "漢字"), ("response", "ü")]
    assert reader.answer().ended
