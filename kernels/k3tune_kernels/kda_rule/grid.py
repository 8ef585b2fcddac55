"""Documents cut into chunks: the first chunks of all documents, then their second ones, and so on.

Each document begins a chunk of its own, so nothing within a chunk must be masked, and a state that
goes from chunk to chunk takes as many steps as the longest document has chunks, however many
documents stand in a row. The longest come first: at every step the documents that go on are the
first ones.

Shape letters: ``B`` batch, ``T`` tokens, ``N`` documents, ``Z`` chunks of all of them, ``C`` tokens
in a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkGrid:
    """Where each token goes.

    Attributes:
        chunk_size: ``C``.
        slots: place of each of the ``B * T`` tokens among the ``Z * C`` of the grid.
        steps: how many documents have a first chunk, a second one, ...; their sum is ``Z``.
        first_B, last_B: the document, in the grid's order, each row begins and ends with.
    """

    chunk_size: int
    slots: Tensor
    steps: list[int]
    first_B: Tensor
    last_B: Tensor

    def fill(self, x_BTHX: Tensor) -> Tensor:
        """``[B, T, H, X]`` to ``[Z, H, C, X]``, zero where a chunk is longer than its document."""
        size = sum(self.steps) * self.chunk_size
        flat = x_BTHX.flatten(0, 1)
        grid = flat.new_zeros(size, *flat.shape[1:]).index_copy(0, self.slots, flat)
        return grid.unflatten(0, (-1, self.chunk_size)).transpose(1, 2)

    def empty(self, x_ZHCX: Tensor, batch: int) -> Tensor:
        """The inverse of :meth:`fill`."""
        flat = x_ZHCX.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)
        return flat.unflatten(0, (batch, -1))


def chunk_grid(bounds: Tensor, length: int, chunk_size: int) -> ChunkGrid:
    """Lay out the documents of a batch.

    Args:
        bounds: cumulative lengths of the documents over the flattened tokens.
        length: ``T``, tokens of a row.
        chunk_size: most tokens a chunk; fewer when no document is so long.
    """
    (last_B,) = (bounds[1:] % length == 0).nonzero(as_tuple=True)
    lengths = bounds.diff()
    chunk_size = min(chunk_size, int(lengths.max()))
    chunks, order = (-(-lengths // chunk_size)).sort(descending=True, stable=True)
    numbers = torch.arange(len(order), device=order.device)
    rank = torch.empty_like(order)
    rank[order] = numbers
    # documents that reach each step: the counts descend, so it is where a step would be inserted
    steps = torch.arange(int(chunks[0]), device=order.device)
    reaching = torch.searchsorted(-chunks, -steps)
    offsets = reaching.cumsum(0) - reaching
    document = numbers.repeat_interleave(lengths)
    place = torch.arange(len(document), device=order.device) - bounds[document]
    slots = (offsets[place // chunk_size] + rank[document]) * chunk_size + place % chunk_size
    first_B = torch.nn.functional.pad(last_B[:-1] + 1, (1, 0))
    return ChunkGrid(chunk_size, slots, reaching.tolist(), rank[first_B], rank[last_B])
