"""From messages and texts to token ids, loss masks and packed rows."""

from typing import TYPE_CHECKING

from k3tune.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3tune.data.chat import render_chat
    from k3tune.data.packing import pack
    from k3tune.data.tokenizer import K3Tokenizer

__all__ = ["K3Tokenizer", "pack", "render_chat"]
__getattr__, __dir__ = lazy_attributes(
    __name__,
    names={
        "K3Tokenizer": "k3tune.data.tokenizer",
        "pack": "k3tune.data.packing",
        "render_chat": "k3tune.data.chat",
    },
)
