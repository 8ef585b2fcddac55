"""Token ids of the published tokenizer, by the table of its segments.

The tokenizer's file is not in the repository. What is known of it publicly is the id of each
segment of the format and the ids of one whole prompt.
"""

import pytest

from k3tune.data import render_chat

CONTROL = {"<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589}
SEGMENTS = {
    "message": 2778,
    " role": 6244,
    '="': 878,
    '"': 1,
    "user": 2482,
    "system": 14062,
    "assistant": 69702,
    "tool": 20960,
    " type": 1798,
    "think": 39964,
    "response": 12092,
    "tools": 25385,
    "call": 10257,
    " tool": 4453,
    " index": 4002,
    "argument": 47185,
    " key": 2355,
    "Hi": 18699,
}


class PublishedSegments:
    """Knows the segments of the table, and gives every other text one id of its own."""

    def __init__(self) -> None:
        self.others: dict[str, int] = {}

    def encode_text(self, text: str) -> list[int]:
        return [SEGMENTS.get(text) or self.others.setdefault(text, 900_000 + len(self.others))]

    def control_id(self, token: str) -> int:
        return CONTROL[token]


@pytest.fixture
def published():
    return PublishedSegments()


def test_the_published_prompt_of_22_ids(published):
    rendered = render_chat(
        [{"role": "user", "content": "Hi"}],
        published,
        thinking_effort=None,
        add_generation_prompt=True,
    )
    assert rendered.input_ids == [
        *(163587, 2778, 6244, 878, 2482, 1, 163589),
        18699,
        *(163588, 2778, 163589, 163586),
        *(163587, 2778, 6244, 878, 69702, 1, 163589),
        *(163587, 39964, 163589),
    ]
    assert len(rendered.input_ids) == 22
    assert not published.others
    assert not any(rendered.assistant_mask)


def test_the_assistant_header_of_7_ids_is_masked_and_the_rest_of_the_message_is_trained(published):
    rendered = render_chat(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}],
        published,
        thinking_effort=None,
    )
    answer = rendered.input_ids[12:]
    assert answer == [
        *(163587, 2778, 6244, 878, 69702, 1, 163589),
        *(163587, 39964, 163589, 163588, 39964, 163589),
        *(163587, 12092, 163589, 18699, 163588, 12092, 163589),
        *(163588, 2778, 163589, 163586),
    ]
    assert rendered.assistant_mask == [0] * (12 + 7) + [1] * (len(answer) - 7)


def test_every_attribute_is_four_segments(published):
    calls = [{"id": "a", "function": {"name": "f", "arguments": {"x": "Hi"}}}]
    rendered = render_chat(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "Hi"},
        ],
        published,
        thinking=False,
    )
    f, one, x, string = (published.others[text] for text in ("f", "1", "x", "string"))
    assert rendered.input_ids[12 + 7 + 6 :] == [
        *(163587, 25385, 163589),
        *(163587, 10257, 4453, 878, f, 1, 4002, 878, one, 1, 163589),
        *(163587, 47185, 2355, 878, x, 1, 1798, 878, string, 1, 163589),
        18699,
        *(163588, 47185, 163589),
        *(163588, 10257, 163589),
        *(163588, 25385, 163589),
        *(163588, 2778, 163589, 163586),
        *(163587, 2778, 6244, 878, 20960, 1, 4453, 878, f, 1, 4002, 878, one, 1, 163589),
        18699,
        *(163588, 2778, 163589, 163586),
    ]
