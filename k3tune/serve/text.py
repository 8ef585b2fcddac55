"""Tokens as text, one by one."""

import codecs

from k3tune.data.tokenizer import K3Tokenizer
from k3tune.rl.engines.continuous import SampledToken
from k3tune.serve.limits import Refused


class TextReader:
    """Text of a completion that is no chat; characters appear once all their bytes are there.

    Args:
        tokenizer: of the base; None gives empty text.
    """

    def __init__(self, tokenizer: K3Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: SampledToken) -> str:
        """What a token adds; the one that stops a text is no part of it."""
        if self._tokenizer is None:
            return ""
        ended = token.finish_reason is not None
        data = b"" if token.finish_reason == "stop" else bytes_of(self._tokenizer, token.token_id)
        return self._decoder.decode(data, final=ended)


def bytes_of(tokenizer: K3Tokenizer, token_id: int) -> bytes:
    """Bytes of a token; none where the base has more ids than its tokenizer."""
    return tokenizer.decode_bytes([token_id]) if token_id < tokenizer.vocab_size else b""


def token_text(tokenizer: K3Tokenizer | None, token_id: int) -> str:
    """A token for people: its text, or its id where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return bytes_of(tokenizer, token_id).decode("utf-8", "replace")


def needed(tokenizer: K3Tokenizer | None, what: str) -> K3Tokenizer:
    """The tokenizer.

    Raises:
        Refused: if the base has none.
    """
    if tokenizer is None:
        raise Refused(400, f"{what} needs a tokenizer, and the base has none: send token ids")
    return tokenizer
