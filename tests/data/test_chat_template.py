"""``apply_chat_template`` does what transformers promises of it, through the encoder."""

import copy

import pytest
import torch

from k3tune.data import render_chat
from k3tune.errors import ConfigError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


def test_apply_chat_template_gives_ids_text_or_a_mask(tokenizer):
    rendered = render_chat(CHAT, tokenizer)
    encoded = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True)
    assert encoded["input_ids"] == rendered.input_ids
    assert encoded["assistant_masks"] == rendered.assistant_mask
    assert encoded["attention_mask"] == [1] * len(rendered.input_ids)
    assert "assistant_masks" not in tokenizer.apply_chat_template(CHAT)
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == rendered.input_ids
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == rendered.text
    assert tokenizer.apply_chat_template([CHAT], tokenize=False) == [rendered.text]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_with_their_masks(tokenizer, side):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    batch = tokenizer.apply_chat_template(
        [CHAT, CHAT[:1]],
        padding=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        thinking=False,
    )
    long, short = (render_chat(chat, tokenizer, thinking=False) for chat in (CHAT, CHAT[:1]))
    gap = len(long.input_ids) - len(short.input_ids)
    pad = [tokenizer.pad_token_id] * gap
    padded = pad + short.input_ids if side == "left" else short.input_ids + pad
    assert batch["input_ids"].tolist() == [long.input_ids, padded]
    assert batch["assistant_masks"].tolist() == [long.assistant_mask, [0] * len(padded)]
    assert batch["attention_mask"].sum(1).tolist() == [len(padded), len(padded) - gap]


def test_one_chat_as_tensors_has_a_batch_axis_and_may_be_cut(tokenizer):
    batch = tokenizer.apply_chat_template(
        CHAT,
        return_tensors="pt",
        truncation=True,
        max_length=9,
        return_assistant_tokens_mask=True,
    )
    first = render_chat(CHAT, tokenizer).input_ids[:9]
    assert torch.equal(batch["input_ids"], torch.tensor([first]))
    assert batch["assistant_masks"].shape == batch["attention_mask"].shape == (1, 9)


def test_a_function_is_a_tool(tokenizer):
    def add(a: int) -> int:
        """Add one.

        Args:
            a: a number.
        """
        return a + 1

    text = tokenizer.apply_chat_template(CHAT, tools=[add], tokenize=False)
    assert '[{"function":{"description":"Add one.","name":"add","parameters":' in text


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "x"}]},
        {"continue_final_message": True},
        {"enable_thinking": False},
        {"return_assistant_tokens_mask": True, "return_dict": False},
    ],
    ids=str,
)
def test_options_the_format_does_not_have_are_refused(tokenizer, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        tokenizer.apply_chat_template(CHAT, **options)
