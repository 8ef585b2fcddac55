"""What K3 remembers between decoding steps.

A KDA layer keeps its state and the last inputs of its convolutions: constant in the length. An MLA
layer keeps the normalised latent and the shared key part, ``kv_lora_rank + qk_rope_head_dim``
values a token, and expands them when it attends.

Shape letters: ``B`` batch, ``T`` new tokens, ``S`` cached tokens, ``P`` earlier convolution inputs,
``C`` channels, ``H`` heads, ``K`` / ``V`` key / value head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache

from k3tune.model.documents import Documents
from k3tune.published.architecture import Architecture

RowPick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DeltaState:
    """What KDA's rule carries from one token to the next.

    Attributes:
        value_BHKV: the state ``S``.
        document_B: number of the document it belongs to; None when each row is one document.
    """

    value_BHKV: Tensor
    document_B: Tensor | None = None

    def entering(self, ids_BT: Tensor | None) -> Tensor:
        """The state before tokens of these documents: zero in rows that begin with another one."""
        if ids_BT is None:
            return self.value_BHKV
        document_B = 0 if self.document_B is None else self.document_B
        goes_on = torch.eq(ids_BT[:, 0], document_B)[:, None, None, None]
        # not by a product: a document's NaN is its own
        return self.value_BHKV.where(goes_on, 0.0)


class KDACacheLayer:
    """State and convolution inputs of one KDA layer; None before the first token."""

    def __init__(self) -> None:
        self.state: DeltaState | None = None
        self.conv_inputs: tuple[Tensor, ...] | None = None

    def keep_conv_inputs(self, inputs: list[Tensor], pasts: tuple[Tensor, ...]) -> None:
        """Remember the last inputs of each convolution.

        Args:
            inputs: new inputs ``[B, T, C]``.
            pasts: the ``[B, P, C]`` before them; as many are kept.
        """
        self.conv_inputs = tuple(
            torch.cat([past, x], dim=1)[:, x.shape[1] :]
            for x, past in zip(inputs, pasts, strict=True)
        )

    def pick_rows(self, pick: RowPick) -> None:
        """Apply ``pick`` to the batch dimension of everything held."""
        if self.state is not None:
            document = self.state.document_B
            self.state = DeltaState(
                pick(self.state.value_BHKV), None if document is None else pick(document)
            )
        if self.conv_inputs is not None:
            self.conv_inputs = tuple(pick(x) for x in self.conv_inputs)


class MLACacheLayer:
    """Compressed keys and values of one MLA layer."""

    def __init__(self) -> None:
        self.compressed_BSC: Tensor | None = None

    def extend(self, compressed_BTC: Tensor) -> Tensor:
        """Append new tokens and return all, ``[B, S, kv_lora_rank + qk_rope_head_dim]``."""
        if self.compressed_BSC is not None:
            compressed_BTC = torch.cat([self.compressed_BSC, compressed_BTC], dim=1)
        self.compressed_BSC = compressed_BTC
        return compressed_BTC

    def pick_rows(self, pick: RowPick) -> None:
        """Apply ``pick`` to the batch dimension of everything held."""
        if self.compressed_BSC is not None:
            self.compressed_BSC = pick(self.compressed_BSC)


class K3Cache(Cache):
    """One cache layer a decoder layer, and the documents of the tokens they hold.

    ``use_cache=True`` returns one as ``past_key_values``; pass it back with only the new ids.
    A recurrent state cannot be rolled back, so assisted generation is refused.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(layers=[])
        # not transformers' layer types: they have no place for a decay state or a latent
        self.layers: list[KDACacheLayer | MLACacheLayer] = [  # type: ignore[assignment]
            MLACacheLayer() if architecture.is_mla(layer) else KDACacheLayer()
            for layer in range(architecture.num_hidden_layers)
        ]
        self.documents: Documents | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether it holds tokens."""
        return self.documents is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, padding included."""
        return 0 if self.documents is None else self.documents.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """Never: MLA's part grows."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Never: KDA's state holds no history."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens.

        Raises:
            NotImplementedError: unless there is nothing to remove.
        """
        if tokens_to_remove:
            raise NotImplementedError(
                f"cannot remove {tokens_to_remove} tokens from a K3 cache: KDA's recurrent state "
                "keeps no history; generate without an assistant model or prompt lookup"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.layers = [type(layer)() for layer in self.layers]
        self.documents = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep rows ``beam_idx`` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows ``indices``, in this order."""
        self._pick_rows(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._pick_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _pick_rows(self, pick: RowPick) -> None:
        for layer in self.layers:
            layer.pick_rows(pick)
        if self.documents is not None and self.documents.ids_BS is not None:
            self.documents = replace(self.documents, ids_BS=pick(self.documents.ids_BS))
