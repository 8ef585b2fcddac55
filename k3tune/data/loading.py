"""The tokenizer of a base, with what can be wrong with its files said in a sentence."""

import re
from pathlib import Path

from k3tune.data.tokenizer import RANKS_FILE, K3Tokenizer
from k3tune.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_tokenizer(path: str, vocab_size: int, otherwise: str | None = None) -> K3Tokenizer:
    """Load the tokenizer of a folder, or of a hub id.

    Args:
        path: where its files are.
        vocab_size: ids that the base knows.
        otherwise: what a user without the files can do; the end of a sentence.

    Raises:
        ConfigError: if its files are not there, or it has ids the base does not have.
        CheckpointError: if the files do not make one.
    """
    if Path(path).is_dir() and not (Path(path) / RANKS_FILE).is_file():
        raise ConfigError(
            f"{path} holds no {RANKS_FILE}, expected the tokenizer's files there: download them"
            + (f", or {otherwise}" if otherwise else "")
        )
    if not Path(path).exists() and not _HUB_ID.fullmatch(path):
        raise ConfigError(
            f"{path} is not there, expected a folder with the tokenizer's files, or a hub id such "
            "as org/name"
        )
    try:
        tokenizer = K3Tokenizer.from_pretrained(path)
    except OSError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot load the tokenizer of {path}: {reason}") from error
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer of {path} has {tokenizer.vocab_size} ids, expected at most the "
            f"{vocab_size} of the base's config.json: take both from one checkpoint"
        )
    return tokenizer
