"""The tokenizer: files, special tokens, bytes, and what transformers asks of it."""

import base64
import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import FIRST_SPECIAL, PIECES, SPECIAL_TOKENS

from k3tune.data import K3Tokenizer
from k3tune.data.tokenizer import write_tokenizer
from k3tune.errors import CheckpointError, ConfigError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
# offset from the first special id, as in the published tokenizer_config.json
PUBLISHED_NAMES = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    9: ("[EOT]", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}


def write_files(folder, ranks: list[bytes], config: dict) -> None:
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def published_config(first: int) -> dict:
    return {
        "added_tokens_decoder": {
            str(first + offset): {"content": name, "special": special}
            for offset, (name, special) in PUBLISHED_NAMES.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


@pytest.fixture
def published_form(tmp_path):
    write_files(tmp_path, [bytes([b]) for b in range(256)] + [b"Hello"], published_config(257))
    return K3Tokenizer.from_pretrained(tmp_path)


def words(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode(token) for token in tokenizer.encode_text(text)[-20:]]


def test_ids_are_bytes_then_pieces_then_special_tokens(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == FIRST_SPECIAL + len(SPECIAL_TOKENS)
    assert tokenizer.encode_text("!") == [ord("!")]
    assert [tokenizer.encode_text(piece) for piece in PIECES] == [
        [index] for index in range(256, FIRST_SPECIAL)
    ]
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(
        range(FIRST_SPECIAL, len(tokenizer))
    )


def test_256_ids_are_reserved_in_the_published_form_and_those_without_a_name_get_one(
    published_form,
):
    assert published_form.vocab_size == 257 + 256
    assert published_form.decode([264, 266, 511]) == "<|reserved_token_264|>[EOT][UNK]"
    assert published_form.convert_tokens_to_ids("<|reserved_token_264|>") == 264
    assert published_form.pad_token_id == 512


def test_generation_stops_on_the_end_of_a_message_and_on_the_end_of_a_text(published_form):
    assert published_form.eos_token == "<|end_of_msg|>"
    assert published_form.end_of_text_token == "[EOS]"
    assert published_form.stop_token_ids == [259, 258]


def test_decoding_for_people_keeps_the_tokens_an_answer_is_parsed_by(published_form):
    ids = [257, 260, 262, *published_form.encode_text("Hi"), 261, 259, 512]
    shown = published_form.decode(ids, skip_special_tokens=True)
    assert shown == "<|open|><|sep|>Hi<|close|>"


@pytest.mark.parametrize("text", [*SPECIAL_TOKENS, "<|reserved_token_300|>"])
def test_the_name_of_a_special_token_is_text_unless_asked_otherwise(tokenizer, text):
    assert max(tokenizer(f"a{text}b")["input_ids"]) < FIRST_SPECIAL
    if text in SPECIAL_TOKENS:
        ids = tokenizer(f"a{text}b", split_special_tokens=False)["input_ids"]
        assert ids == [97, tokenizer.control_id(text), 98]


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Hello world", ["Hello", " world"]),
        ("Hello漢字 world", ["Hello", "漢字", " world"]),
        ("don't", ["don't"]),
        ("(don't", ["(", "d", "o", "n", "'", "t"]),
        ("1234", ["123", "4"]),
        ("!!\n\n\n", ["!", "!", "\n", "\n", "\n"]),
        ("!!\n\nHello", ["!!\n\n", "Hello"]),
        ("a   ", ["a", "   "]),
        ("a    world", ["a", "   ", " world"]),
        ("Hello\nworld", ["Hello", "\n", "w", "o", "r", "l", "d"]),
        ("usermessage", ["u", "s", "e", "r", "m", "e", "s", "s", "a", "g", "e"]),
        ("userMessage", ["user", "M", "e", "s", "s", "a", "g", "e"]),
    ],
)
def test_pre_tokenised_words(tokenizer, text, split):
    # a piece of these is used only where it equals a whole word, which shows the words' ends
    assert words(tokenizer, text) == split


def test_runs_without_a_space_are_cut_at_25000(tokenizer):
    # a word is cut in two where the bound falls inside it
    assert words(tokenizer, "x" * 24_999 + "Hello")[-5:] == [*"Hello"]
    assert words(tokenizer, "x" * 25_000 + "Hello")[-2:] == ["x", "Hello"]
    assert words(tokenizer, "x" * 24_998 + " world")[-1:] == [" world"]


def test_long_texts_are_cut_every_400000_characters(tokenizer):
    padding = "ab " * 133_333
    assert words(tokenizer, padding + "Hello")[-5:] == [*"Hello"]
    assert words(tokenizer, padding + "aHello")[-2:] == ["a", "Hello"]


@given(st.binary())
def test_any_bytes_make_a_round_trip(tokenizer, data):
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@given(st.text())
def test_any_text_makes_a_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode_text(text) == tokenizer.encode_bytes(text.encode())
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.convert_tokens_to_ids(tokens) == ids
    assert tokenizer.convert_tokens_to_string(tokens) == text


@pytest.mark.parametrize("length", [24_999, 25_001, 400_001])
@pytest.mark.parametrize("unit", ["x", " ", "é ", "漢", "\n\t"])
def test_long_texts_make_a_round_trip(tokenizer, unit, length):
    text = (unit * length)[:length]
    assert tokenizer.decode_bytes(tokenizer.encode_text(text)).decode() == text


def test_half_of_a_surrogate_pair_is_no_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b")) == "a\ufffdb"


def test_all_256_bytes_decode_one_by_one(tokenizer):
    assert tokenizer.decode_bytes(range(256)) == bytes(range(256))
    assert tokenizer.decode([0xE6, 0xBC]) == "\ufffd"


def test_an_id_outside_the_vocabulary_is_named(tokenizer):
    with pytest.raises(ConfigError, match=f"the id {len(tokenizer)} is outside the vocabulary"):
        tokenizer.decode_bytes([len(tokenizer)])


def test_saving_and_reading_back_changes_nothing(published_form, tmp_path):
    folder = tmp_path / "saved"
    published_form.save_pretrained(folder)
    again = K3Tokenizer.from_pretrained(folder)
    assert (folder / "tiktoken.model").read_bytes() == (tmp_path / "tiktoken.model").read_bytes()
    assert again.get_vocab() == published_form.get_vocab()
    assert again.special_tokens_map == published_form.special_tokens_map
    assert again.all_special_ids == published_form.all_special_ids
    assert again.stop_token_ids == [259, 258]
    assert sorted(file.name for file in folder.iterdir()) == [
        "tiktoken.model",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_for_workers_encode_alike(tokenizer, copied):
    other = copied(tokenizer)
    assert other.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT)
    assert other.encode_text("Hello world") == tokenizer.encode_text("Hello world")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ranks, config: ranks.pop(7), "lacks 1 of the 256 bytes"),
        (lambda ranks, config: ranks.append(b"a"), "holds a piece twice"),
        (
            lambda ranks, config: ranks.append(b"x" * 3),
            "names the id 257, .* from 258",
        ),
        (lambda ranks, config: config["added_tokens_decoder"].pop("260"), "lacks '<|open|>'"),
        (lambda ranks, config: config.pop("added_tokens_decoder"), "names none"),
        (lambda ranks, config: config.update(pad_token="<pad>"), "names pad_token '<pad>'"),
        (lambda ranks, config: config.update(eos_token="<eos>"), "names end_of_text_token '<eos>'"),
        (
            lambda ranks, config: config["added_tokens_decoder"]["266"].update(content="[EOS]"),
            "gives a name twice",
        ),
        (
            lambda ranks, config: config["added_tokens_decoder"]["266"].update(content="Hello"),
            "a special token's name is also a mergeable piece",
        ),
    ],
    ids=range(9),
)
def test_files_that_do_not_belong_together(tmp_path, change, sentence):
    ranks, config = [bytes([b]) for b in range(256)] + [b"Hello"], published_config(257)
    change(ranks, config)
    write_files(tmp_path, ranks, config)
    with pytest.raises(CheckpointError, match=sentence.replace("|", r"\|")):
        K3Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("line", ["aGk= x", "a?b= 3", "aGk="])
def test_a_line_that_is_no_piece_is_named(tmp_path, line):
    write_files(tmp_path, [bytes([b]) for b in range(256)], published_config(256))
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match="line 257 is no base64 piece and rank"):
        K3Tokenizer.from_pretrained(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tiktoken\.model found"):
        K3Tokenizer.from_pretrained(tmp_path)


def test_a_piece_that_would_never_be_used_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'two words' is never used"):
        write_tokenizer(tmp_path, [b"two words"], SPECIAL_TOKENS)


def test_a_tokenizer_without_the_control_tokens_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match=r"lacks '<\|open\|>'"):
        write_tokenizer(tmp_path, [], [token for token in SPECIAL_TOKENS if token != "<|open|>"])
