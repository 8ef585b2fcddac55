"""The command line in this process, and a tiny base that reads text."""

import shutil
from pathlib import Path

import pytest

from k3tune.cli import main
from k3tune.data import K3Tokenizer
from k3tune.data.tokenizer import write_tokenizer

_PIECES = (b"message", b" role", b"user", b"assistant", b"think", b"response", b"tools", b"call")
_SPECIAL_TOKENS = ("[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]")


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run ``k3tune`` with these arguments: exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return stopped.value.code or 0, captured.out, captured.err


def make_text_base(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint of 320 ids, with a tokenizer that gives each of them a meaning."""
    shutil.copytree(checkpoint, folder)
    fillers = 320 - 256 - len(_PIECES) - len(_SPECIAL_TOKENS)
    special = [*_SPECIAL_TOKENS, *(f"<|filler_{number}|>" for number in range(fillers))]
    write_tokenizer(folder, _PIECES, special)
    return folder


def markup_ids(tokenizer: K3Tokenizer, text: str) -> list[int]:
    """Ids of text in which the names of control tokens are these tokens."""
    return tokenizer(text, split_special_tokens=False)["input_ids"]


class Script:
    """Makes a model say given ids, whatever it would say; its layers and caches still run.

    Attributes:
        lengths: of the inputs the model has read, call by call.
    """

    def __init__(self, model, ids: list[int]) -> None:
        self.lengths: list[int] = []
        self._ids = iter(ids)
        model.lm_head.register_forward_hook(self._say)
        model.model.embed_tokens.register_forward_hook(self._note)

    def _note(self, module, inputs, output) -> None:
        self.lengths.append(inputs[0].shape[1])

    def _say(self, module, inputs, logits):
        token = next(self._ids)
        if token is KeyboardInterrupt:
            raise token
        logits[:, -1] = -1e9
        logits[:, -1, token] = 0
        return logits
