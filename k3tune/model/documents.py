"""Which tokens may see each other: documents packed in a row, and padding.

Every description a caller may give (an attention mask, restarting position ids, cumulative
lengths, sequence indices) is turned into one number a token, its document. KDA's state, its
convolutions and MLA all reset by comparing these numbers.

Shape letters: ``B`` batch, ``T`` new tokens, ``S`` all tokens including cached ones.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

PADDING = -1
"""Document number of a masked token."""


@dataclass(frozen=True)
class Documents:
    """Documents of the new tokens and of the cached ones before them.

    Attributes:
        ids_BS: int64 document number of every token, ``PADDING`` where masked; None when each row
            is one document without padding.
        num_new: how many tokens are new.
        num_cached: how many stand in the cache before them.
    """

    ids_BS: Tensor | None
    num_new: int
    num_cached: int = 0

    @property
    def num_tokens(self) -> int:
        """``S``: cached and new tokens of a row."""
        return self.num_cached + self.num_new

    @property
    def new_ids_BT(self) -> Tensor | None:
        """Document numbers of the new tokens."""
        return None if self.ids_BS is None else self.ids_BS[:, self.num_cached :]

    @cached_property
    def _starts_BT(self) -> Tensor:
        """Whether a new token begins a document or a row."""
        ids = self.new_ids_BT
        assert ids is not None, "one document a row has no starts"
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return starts

    @cached_property
    def last_of_row_B(self) -> Tensor | None:
        """Index, in :attr:`cu_seq_lens`, of the document each row ends with; None as there."""
        return None if self.ids_BS is None else self._starts_BT.sum(1).cumsum(0) - 1

    @cached_property
    def cu_seq_lens(self) -> Tensor | None:
        """Cumulative document lengths of the flattened new tokens, int64; None as ``ids_BS``.

        Computed once a forward pass, and only for kernels that want it: its length depends on the
        data, so a GPU must be waited for.
        """
        if self.ids_BS is None:
            return None
        (positions,) = self._starts_BT.flatten().nonzero(as_tuple=True)
        return torch.cat([positions, positions.new_tensor([self._starts_BT.numel()])])

    @cached_property
    def first_keys(self) -> list[int] | None:
        """Of each new token, the first token of any row's document at its place; None for 0.

        Nothing before it is attended to from there on. Computed once a forward pass.
        """
        if self.ids_BS is None:
            return None
        # a document that goes on behind padding is one document
        ids = self.ids_BS.cummax(1).values
        places = torch.arange(self.num_tokens, device=ids.device).expand_as(ids)
        begins = places[:, 1:].where(ids[:, 1:] != ids[:, :-1], 0).cummax(1).values
        first = torch.nn.functional.pad(begins.amin(0), (1, 0))
        return first[self.num_cached :].tolist()

    def reach(self, context: int) -> Tensor | None:
        """Whether the token ``context - j`` before each new one is in its document.

        Returns:
            bool ``[B, T, context]``, or None when all are.
        """
        if self.ids_BS is None or not context:
            return None
        padded = torch.nn.functional.pad(self.ids_BS, (context, 0), value=PADDING)
        windows = [padded[:, self.num_cached + j :][:, : self.num_new] for j in range(context)]
        return torch.stack(windows, dim=-1) == self.ids_BS[:, self.num_cached :, None]


def find_documents(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    max_length: int | None = None,
    seq_idx: Tensor | None = None,
    front: "FrontPadding | None" = None,
    cached: Documents | None = None,
) -> Documents:
    """Number the documents of a batch.

    A document starts wherever one of the descriptions says so: a position id of 0 at an unmasked
    place, an entry of ``cu_seq_lens``, a change of ``seq_idx``. New tokens that start none go on
    with the document of the last cached token.

    Args:
        shape: ``(B, T)`` of the new tokens.
        attention_mask: ``[B, T]``, 0 at padding.
        position_ids: ``[B, T]`` or ``[1, T]``.
        cu_seq_lens: int ``[documents + 1]`` over the flattened batch, from 0 to ``B * T``.
        max_length: longest document ``cu_seq_lens`` may hold; None for any.
        seq_idx: int ``[B, T]``, the document of each token.
        front: where the model moves masked tokens; the result is in that order.
        cached: documents of the tokens in the cache.

    Raises:
        ValueError: if a description does not fit the batch.
    """
    if position_ids is not None and position_ids.shape[0] == 1:
        position_ids = position_ids.expand(shape[0], -1)
    if cu_seq_lens is not None:
        _check_lengths(cu_seq_lens, shape[0] * shape[1], max_length)
    starts = _document_starts(shape, device, attention_mask, position_ids, cu_seq_lens, seq_idx)
    masked = None if attention_mask is None else attention_mask == 0
    num_cached = 0 if cached is None else cached.num_tokens
    cached_ids = None if cached is None else cached.ids_BS
    if starts is None and masked is None and cached_ids is None:
        return Documents(None, shape[1], num_cached)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    if starts is not None:
        ids = starts.long().cumsum(dim=1)
    if num_cached:
        if cached_ids is None:
            cached_ids = ids.new_zeros(shape[0], num_cached)
        # a row whose cached tokens are all padding begins with document 0
        ids = ids + cached_ids.amax(1, keepdim=True).clamp(min=0)
    if masked is not None:
        ids = ids.masked_fill(masked, PADDING)
    if front is not None:
        ids = front.front(ids)
    if cached_ids is not None:
        ids = torch.cat([cached_ids, ids], dim=1)
    return Documents(ids, shape[1], num_cached)


def _check_lengths(cu_seq_lens: Tensor, total: int, max_length: int | None) -> None:
    usable = cu_seq_lens.ndim == 1 and len(cu_seq_lens) > 1 and not cu_seq_lens.is_floating_point()
    bounds = cu_seq_lens.tolist() if usable else []
    if not usable or bounds[0] != 0 or bounds[-1] != total or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seq_lens is {cu_seq_lens.tolist()} ({cu_seq_lens.dtype}), expected ascending "
            f"integers from 0 to {total}, the tokens of the batch"
        )
    longest = max(stop - start for start, stop in pairwise(bounds))
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"max_length is {max_length}, but cu_seq_lens holds a document of {longest} tokens"
        )


def _document_starts(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor | None:
    for name, value in (
        ("attention_mask", attention_mask),
        ("position_ids", position_ids),
        ("seq_idx", seq_idx),
    ):
        if value is not None and tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)} (batch, tokens): "
                "pass one value a token"
            )
    starts = []
    if position_ids is not None:
        restart = position_ids == 0
        starts.append(restart if attention_mask is None else restart & (attention_mask != 0))
    if cu_seq_lens is not None:
        total = shape[0] * shape[1]
        marks = torch.zeros(total + 1, dtype=torch.bool, device=device)
        marks[cu_seq_lens.long()] = True
        starts.append(marks[:-1].view(shape))
    if seq_idx is not None:
        changed = torch.ones(shape, dtype=torch.bool, device=device)
        changed[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        starts.append(changed)
    return torch.stack(starts).any(0) if starts else None


class FrontPadding:
    """Moves masked tokens to the front of each row, and results back to their places.

    KDA and its convolutions then see padding only before a row's first token, so every mask a
    caller may pass (left, right, holes) gives what the unpadded row gives.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        # stable: real tokens keep their order; a left-padded row is left as it is
        self.order_BT = torch.argsort((attention_mask != 0).to(torch.uint8), dim=1, stable=True)
        self.inverse_BT = torch.argsort(self.order_BT, dim=1)

    def front(self, x: Tensor) -> Tensor:
        """``x`` of shape ``[B, T, ...]`` with each row's masked tokens first."""
        return self._gather(x, self.order_BT)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`front`."""
        return self._gather(x, self.inverse_BT)

    @staticmethod
    def _gather(x: Tensor, index_BT: Tensor) -> Tensor:
        index = index_BT.reshape(*index_BT.shape, *([1] * (x.ndim - 2))).expand_as(x)
        return torch.gather(x, 1, index)
