"""How many rows each expert got, layer by layer: measured, kept in a file, summed over ranks.

Shape letters: ``E`` experts, ``R`` ranks of an expert-parallel group.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from k3tune.errors import ConfigError
from k3tune.files import path_text, replace_file, shown
from k3tune.parallel.shards import ExpertShards, is_layer
from k3tune.published.safetensors_files import read_json

FORMAT = 1
MOST_ROWS = 2**48
"""Rows of one expert; the sum over a layer's experts stays an int64."""
Loads = NDArray[np.int64]


@dataclass(frozen=True)
class LayerLoad:
    """How one layer's rows fall on the ranks.

    Attributes:
        layer: zero-based.
        imbalance: rows of the busiest rank over the mean.
        busiest_rank: that rank.
        hottest: experts with the most rows, and their share of the layer's rows.
    """

    layer: int
    imbalance: float
    busiest_rank: int
    hottest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RouterCounts:
    """Rows by layer and expert.

    Attributes:
        num_experts: experts a layer.
        layers: zero-based layer -> int64 ``[E]``.
    """

    num_experts: int
    layers: Mapping[int, Loads]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("router counts of no layer, expected one MoE layer at least")
        for layer, counts_E in self.layers.items():
            if counts_E.shape != (self.num_experts,) or counts_E.min(initial=0) < 0:
                raise ConfigError(
                    f"router counts of layer {layer} have shape {counts_E.shape} and a smallest "
                    f"of {counts_E.min(initial=0)}, expected {self.num_experts} counts from 0 on"
                )
            if not counts_E.any():
                raise ConfigError(
                    f"router counts of layer {layer} are all 0, expected a measured run"
                )

    @classmethod
    def read(cls, path: str | Path) -> "RouterCounts":
        """Counts of a file that :meth:`write` made.

        Raises:
            ConfigError: if it cannot be read, or holds something else.
        """
        file = Path(path)
        try:
            content = read_json(file.read_bytes(), file, ConfigError)
        except OSError as error:
            raise ConfigError(
                f"cannot read the router counts {path_text(file)}: {error.strerror}"
            ) from error
        wanted = f'expected {{"format": {FORMAT}, "num_experts": E, "counts": {{layer: [...]}}}}'
        if content.get("format") != FORMAT or not isinstance(content.get("counts"), dict):
            raise ConfigError(f"{path_text(file)} holds {shown(sorted(content))}, {wanted}")
        experts, layers = content.get("num_experts"), {}
        if type(experts) is not int:
            raise ConfigError(f"{path_text(file)}: num_experts is {shown(experts)}, {wanted}")
        for layer, row in content["counts"].items():
            whole = isinstance(row, list) and all(
                type(count) is int and abs(count) <= MOST_ROWS for count in row
            )
            if not whole or not is_layer(layer):
                raise ConfigError(
                    f"{path_text(file)} holds {shown(row)} at {shown(layer)}, {wanted}, counts up "
                    f"to {MOST_ROWS}"
                )
            layers[int(layer)] = np.array(row, dtype=np.int64)
        try:
            return cls(experts, dict(sorted(layers.items())))
        except ConfigError as error:
            raise ConfigError(f"{path_text(file)}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Write the counts for :meth:`read`, whole or not at all.

        Raises:
            K3TuneError: if the file cannot be written.
        """
        counts = {str(layer): counts_E.tolist() for layer, counts_E in self.layers.items()}
        content = {"format": FORMAT, "num_experts": self.num_experts, "counts": counts}
        with replace_file(path) as file:
            json.dump(content, file)

    def contiguous(self, num_ranks: int) -> ExpertShards:
        """The shards without a placement."""
        return ExpertShards(self.num_experts, num_ranks)

    def rank_loads(self, shards: ExpertShards, layer: int) -> Loads:
        """Rows of each rank in one layer, int64 ``[R]``."""
        self._check(shards)
        loads_R = np.zeros(shards.num_ranks, dtype=np.int64)
        np.add.at(loads_R, np.array(shards.ranks(layer)), self.layers[layer])
        return loads_R

    def imbalance(self, shards: ExpertShards) -> float:
        """Rows waited for over rows computed: every layer waits for its busiest rank."""
        busiest = total = 0
        for layer, counts_E in self.layers.items():
            busiest += int(self.rank_loads(shards, layer).max())
            total += int(counts_E.sum())
        return busiest * shards.num_ranks / total

    def least_imbalance(self, num_ranks: int) -> float:
        """What no placement gets below: a layer's hottest expert fills its rank's room with the
        coldest ones, and no rank is less busy than the mean.
        """
        room = min(self.contiguous(num_ranks).sizes)
        least, total = 0.0, 0
        for counts_E in self.layers.values():
            ordered = np.sort(counts_E)
            layer = int(ordered.sum())
            least += max(layer / num_ranks, int(ordered[-1] + ordered[: room - 1].sum()))
            total += layer
        return least * num_ranks / total

    def loads(self, shards: ExpertShards, hottest: int = 5) -> list[LayerLoad]:
        """Each layer's load, in order.

        Args:
            shards: which rank holds what.
            hottest: so many experts are named.
        """
        found = []
        for layer, counts_E in self.layers.items():
            loads_R = self.rank_loads(shards, layer)
            order = np.argsort(-counts_E, kind="stable")[:hottest]
            shares = counts_E / counts_E.sum()
            found.append(
                LayerLoad(
                    layer=layer,
                    imbalance=float(loads_R.max() / loads_R.mean()),
                    busiest_rank=int(loads_R.argmax()),
                    hottest=tuple((int(expert), float(shares[expert])) for expert in order),
                )
            )
        return found

    def _check(self, shards: ExpertShards) -> None:
        if shards.num_experts != self.num_experts:
            raise ConfigError(
                f"the placement is of {shards.num_experts} experts, expected {self.num_experts} as "
                "in the router counts: make it from counts of the same base"
            )
