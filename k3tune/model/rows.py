"""Caches of rows at different positions of one batch: what continuous sampling decodes from.

A row has a slot, 0 to ``num_rows - 1``, and its tokens the places 0, 1, ... of that slot. Buffers
hold more of both than are in use, so a row enters, grows and leaves without a copy of the others.

Shape letters: ``B`` rows, ``S`` places, ``P`` earlier convolution inputs, ``C`` channels, ``H``
heads, ``K`` / ``V`` head widths.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3tune.model.cache import K3Cache, KDACacheLayer, MLACacheLayer
from k3tune.published.architecture import Architecture

# a latent buffer's first places; it doubles when they are used up
_FIRST_PLACES = 128


class Moves(NamedTuple):
    """Rows that take the slots of rows that leave, ``sources[i]`` to ``targets[i]``."""

    sources: Tensor
    targets: Tensor
    num_rows: int


class Places(NamedTuple):
    """Where the new token of each row goes in a step, and what it sees.

    Attributes:
        slot_B, place_B: of the new token.
        num_places: places of the longest row, the new token's included.
    """

    slot_B: Tensor
    place_B: Tensor
    num_places: int


class KDARows:
    """One KDA layer: the states, and the last inputs of its three convolutions side by side.

    Attributes:
        derived: what the layer derives from its weights to decode; it lives as long as the rows.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.derived: Any = None
        self._state: Tensor | None = None
        self._inputs: Tensor | None = None

    @property
    def state_BHKV(self) -> Tensor:
        """States of all rows, to be updated in place."""
        assert self._state is not None, "no row was ever added"
        return self._state[: self.num_rows]

    @property
    def inputs_BPC(self) -> Tensor:
        """Inputs of the convolutions of q, k and v before the new token, to be updated in place."""
        assert self._inputs is not None, "no row was ever added"
        return self._inputs[: self.num_rows]

    def append(self, layer: KDACacheLayer, pick_B: Tensor, lengths_B: Tensor) -> None:
        """Take rows ``pick_B`` of a filled cache."""
        assert layer.state is not None and layer.conv_inputs is not None, "an empty cache"
        inputs = torch.cat(layer.conv_inputs, dim=-1)
        # of a prompt shorter than the convolution some of them are padding
        back = torch.arange(inputs.shape[1], 0, -1, device=pick_B.device)
        held = (back <= lengths_B[:, None])[..., None]
        self._state = _appended(self._state, self.num_rows, layer.state.value_BHKV[pick_B])
        self._inputs = _appended(self._inputs, self.num_rows, inputs[pick_B] * held)
        self.num_rows += len(pick_B)

    def move(self, moves: Moves) -> None:
        """Move rows and forget those behind."""
        for buffer in (self._state, self._inputs):
            assert buffer is not None, "no row was ever added"
            buffer[moves.targets] = buffer[moves.sources]
        self.num_rows = moves.num_rows

    def begin(self, places: Places) -> None:
        """Nothing: what is held does not depend on the position."""


class MLARows:
    """One MLA layer: the compressed keys and values.

    Attributes:
        places: of the step that runs.
        derived: what the layer derives from its weights to decode; it lives as long as the rows.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.places: Places | None = None
        self.derived: Any = None
        self._compressed: Tensor | None = None

    def extend(self, compressed_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Put each row's new token at its place.

        Returns:
            All rows' ``[B, S, C]``, and the last place each row holds, int64 ``[B]``.
        """
        assert self._compressed is not None and self.places is not None, "a step calls begin first"
        slot_B, place_B, num_places = self.places
        self._compressed[slot_B, place_B] = compressed_BC
        return self._compressed[: self.num_rows, :num_places], place_B

    def append(self, layer: MLACacheLayer, pick_B: Tensor, lengths_B: Tensor) -> None:
        """Take rows ``pick_B`` of a filled cache, whose padding stands before the tokens."""
        compressed = layer.compressed_BSC
        assert compressed is not None, "an empty cache"
        length = compressed.shape[1]
        places = torch.arange(length, device=pick_B.device) + (length - lengths_B)[:, None]
        rows = compressed[pick_B[:, None], places.clamp(max=length - 1)]
        self._reserve(length)
        if self._compressed is None:
            self._compressed = rows.new_zeros(len(rows), max(length, _FIRST_PLACES), rows.shape[-1])
        padded = rows.new_zeros(len(rows), *self._compressed.shape[1:])
        padded[:, :length] = rows
        self._compressed = _appended(self._compressed, self.num_rows, padded)
        self.num_rows += len(pick_B)

    def move(self, moves: Moves) -> None:
        """Move rows and forget those behind."""
        assert self._compressed is not None, "no row was ever added"
        self._compressed[moves.targets] = self._compressed[moves.sources]
        self.num_rows = moves.num_rows

    def begin(self, places: Places) -> None:
        """Make room for a token a row."""
        self.places = places
        self._reserve(places.num_places)

    def _reserve(self, num_places: int) -> None:
        """Grow to so many places; what nobody has written is zero, so that no mask meets a NaN."""
        held = self._compressed
        if held is None or num_places <= held.shape[1]:
            return
        grown = held.new_zeros(len(held), max(num_places, 2 * held.shape[1]), held.shape[2])
        grown[:, : held.shape[1]] = held
        self._compressed = grown


class RowCache:
    """The caches of all layers, and how many tokens each row holds."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self.device = device
        self.layers: list[KDARows | MLARows] = [
            MLARows() if architecture.is_mla(layer) else KDARows()
            for layer in range(architecture.num_hidden_layers)
        ]
        self._lengths: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return len(self._lengths)

    def append(self, cache: K3Cache, pick: Sequence[int], lengths: Sequence[int]) -> None:
        """Add rows behind those held.

        Args:
            cache: of a finished prefill, any padding before the tokens.
            pick: its row for each new one; a prompt that is sampled several times stands there
                several times.
            lengths: tokens of each new row.
        """
        pick_B, lengths_B = self._on_device(pick), self._on_device(lengths)
        for rows, layer in zip(self.layers, cache.layers, strict=True):
            if isinstance(rows, KDARows) and isinstance(layer, KDACacheLayer):
                rows.append(layer, pick_B, lengths_B)
            elif isinstance(rows, MLARows) and isinstance(layer, MLACacheLayer):
                rows.append(layer, pick_B, lengths_B)
            else:
                raise AssertionError(f"{type(rows)=} {type(layer)=}")
        self._lengths += lengths

    def drop(self, leaving: Sequence[int]) -> Moves:
        """Forget rows; the last of the others take their slots.

        Args:
            leaving: slots, each once.

        Returns:
            The moves, for whoever keeps something else a slot.
        """
        gone, left = set(leaving), self.num_rows - len(leaving)
        targets = sorted(slot for slot in gone if slot < left)
        sources = [slot for slot in range(left, self.num_rows) if slot not in gone]
        moves = Moves(self._on_device(sources), self._on_device(targets), left)
        for layer in self.layers:
            layer.move(moves)
        for source, target in zip(sources, targets, strict=True):
            self._lengths[target] = self._lengths[source]
        del self._lengths[left:]
        return moves

    def begin_step(self) -> None:
        """Make room for one more token in each row."""
        lengths_B = self._on_device(self._lengths)
        num_places = max(self._lengths) + 1
        slot_B = torch.arange(self.num_rows, device=self.device)
        places = Places(slot_B, lengths_B, num_places)
        for layer in self.layers:
            layer.begin(places)

    def end_step(self) -> None:
        """Count the new tokens."""
        self._lengths = [length + 1 for length in self._lengths]

    def _on_device(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _appended(buffer: Tensor | None, num_rows: int, new: Tensor) -> Tensor:
    """``buffer`` with ``new`` in the slots from ``num_rows`` on, grown where they do not fit."""
    stop = num_rows + len(new)
    if buffer is None or stop > len(buffer):
        # rows that come one by one must not copy all others each time
        held = 0 if buffer is None else len(buffer)
        grown = new.new_zeros(max(stop, held + held // 2), *new.shape[1:])
        if buffer is not None:
            grown[:num_rows] = buffer[:num_rows]
        buffer = grown
    buffer[num_rows:stop] = new
    return buffer
