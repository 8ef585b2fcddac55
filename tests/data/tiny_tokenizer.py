"""What the tests' tokenizer holds: ids are the 256 bytes, the pieces, the special tokens."""

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[UNK]",
    "[PAD]",
)
PIECES = (
    "message",
    " role",
    '="',
    "user",
    "system",
    "assistant",
    "tool",
    "think",
    "response",
    "Hello",
    " world",
    "don't",
    "漢字",
    "123",
    "!!\n\n",
    "   ",
)

FIRST_SPECIAL = 256 + len(PIECES)
