"""Which rank shall hold which experts, so that no rank has many more rows than the others.

Every layer waits for its busiest rank, so that rank's rows are what is made small: experts are
handed out from the hottest down, each to the rank with the fewest rows that has room, and then
swapped between the busiest rank and the others as long as that helps. A rank holds as many experts
as without a placement. Same counts, same placement.

The rows are those of many steps together: with thousands of tokens in a step a rank's rows scatter
little about their mean.
"""

import json
from pathlib import Path

import numpy as np

from k3tune.files import replace_file
from k3tune.parallel.router_counts import Loads, RouterCounts
from k3tune.parallel.shards import ExpertShards


def place_experts(counts: RouterCounts, num_ranks: int) -> ExpertShards:
    """Place every measured layer; layers without counts stay contiguous.

    Args:
        counts: rows by layer and expert.
        num_ranks: ranks of an expert-parallel group.

    Raises:
        ConfigError: if there are more ranks than experts.
    """
    sizes = np.array(counts.contiguous(num_ranks).sizes)
    placed = {
        layer: tuple(_place(counts_E, sizes).tolist()) for layer, counts_E in counts.layers.items()
    }
    return ExpertShards(counts.num_experts, num_ranks, placed)


def read_placement(path: str | Path) -> ExpertShards:
    """A placement that :func:`write_placement` wrote.

    Raises:
        ConfigError: if it cannot be read, or is none.
    """
    return ExpertShards.read(path)


def write_placement(path: str | Path, shards: ExpertShards) -> None:
    """Write a placement for ``expert_placement`` of a run, whole or not at all.

    Raises:
        K3TuneError: if the file cannot be written.
    """
    with replace_file(path) as file:
        json.dump(shards.to_json(), file)


def _place(counts_E: Loads, sizes_R: Loads) -> Loads:
    """Rank of each expert of a layer, int64 ``[E]``; ``sizes_R`` is the room on each rank."""
    rank_E = _hand_out(counts_E, sizes_R)
    loads_R = np.bincount(rank_E, weights=counts_E, minlength=len(sizes_R)).astype(np.int64)
    while swap := _best_swap(counts_E, rank_E, loads_R):
        hot, cold = swap
        moved = counts_E[hot] - counts_E[cold]
        loads_R[rank_E[hot]] -= moved
        loads_R[rank_E[cold]] += moved
        rank_E[hot], rank_E[cold] = rank_E[cold], rank_E[hot]
    return rank_E


def _hand_out(counts_E: Loads, sizes_R: Loads) -> Loads:
    """From the hottest expert down to the least busy rank with room; the lowest of equals."""
    rank_E = np.zeros(len(counts_E), dtype=np.int64)
    loads_R, room_R = np.zeros(len(sizes_R), dtype=np.int64), sizes_R.copy()
    full = np.iinfo(np.int64).max
    for expert in np.argsort(-counts_E, kind="stable"):
        rank = int(np.where(room_R > 0, loads_R, full).argmin())
        rank_E[expert] = rank
        loads_R[rank] += counts_E[expert]
        room_R[rank] -= 1
    return rank_E


def _best_swap(counts_E: Loads, rank_E: Loads, loads_R: Loads) -> tuple[int, int] | None:
    """The swap with the busiest rank that leaves the busier of the two least busy; None: no gain.

    Returns:
        An expert of the busiest rank and one of another.
    """
    busiest = int(loads_R.argmax())
    mine, others = np.flatnonzero(rank_E == busiest), np.flatnonzero(rank_E != busiest)
    if not len(others):
        return None
    moved_MO = counts_E[mine][:, None] - counts_E[others][None, :]
    after_MO = np.maximum(loads_R[busiest] - moved_MO, loads_R[rank_E[others]] + moved_MO)
    best = int(after_MO.argmin())
    if after_MO.flat[best] >= loads_R[busiest]:
        return None
    row, column = divmod(best, len(others))
    return int(mine[row]), int(others[column])
