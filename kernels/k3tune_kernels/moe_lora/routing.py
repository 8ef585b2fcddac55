"""Which rows each expert gets, without waiting for the device.

A routed row is a (token, slot) pair; rows are sorted by expert, those of experts that are not local
last. Everything is computed on the device; sizes on the host are bounds.

Shapes: N tokens, A active experts a token, M = N * A rows, E local experts.
"""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        order_M: int64, flat (token, slot) position of each sorted row.
        token_M: int32, its token.
        row_offsets: int32 ``[E + 1]``, first row of each expert; the last counts the local rows.
        slot_NA: int64, the slots of each token in the order of their experts' ids.
        row_NA: int32, sorted row of each of those slots, -1 where its expert is not local.
    """

    order_M: torch.Tensor
    token_M: torch.Tensor
    row_offsets: torch.Tensor
    slot_NA: torch.Tensor
    row_NA: torch.Tensor


class RowTiles(NamedTuple):
    """Tiles of ``block_m`` rows, none of which spans two experts.

    Attributes:
        expert, first_row: int32 ``[bound]``; entries past ``offsets[E]`` mean nothing.
        offsets: int32 ``[E + 1]``, first tile of each expert.
        bound: the most tiles there can be.
    """

    expert: torch.Tensor
    first_row: torch.Tensor
    offsets: torch.Tensor
    bound: int


def local_rows(
    expert_ids: torch.Tensor, num_experts: int, local_experts: torch.Tensor | None
) -> torch.Tensor:
    """Row of the local weights for each id, ``num_experts`` where there is none."""
    ids = expert_ids.long()
    if local_experts is None:
        return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    sorted_ids, row_of_sorted = local_experts.sort()
    place = torch.searchsorted(sorted_ids, ids).clamp(max=num_experts - 1)
    return torch.where(sorted_ids[place] == ids, row_of_sorted[place], num_experts)


def route(
    expert_ids_NA: torch.Tensor, num_experts: int, local_experts: torch.Tensor | None
) -> Routing:
    """Sort the rows of ``expert_ids_NA`` by local expert."""
    device = expert_ids_NA.device
    expert_NA = local_rows(expert_ids_NA, num_experts, local_experts)
    expert_M, order_M = expert_NA.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=device)
    row_offsets = torch.searchsorted(expert_M, bounds).int()
    slot_NA = expert_ids_NA.argsort(dim=1, stable=True)
    # The inverse of a permutation, by a scatter rather than by a second sort.
    place_M = torch.zeros_like(order_M)
    place_M.scatter_(0, order_M, torch.arange(order_M.shape[0], device=device))
    row_NA = place_M.view_as(slot_NA).gather(1, slot_NA)
    row_NA = torch.where(row_NA < row_offsets[-1], row_NA, -1).int()
    token_M = (order_M // expert_ids_NA.shape[1]).int()
    return Routing(order_M, token_M, row_offsets, slot_NA, row_NA)


def row_tiles(row_offsets: torch.Tensor, num_rows: int, block_m: int) -> RowTiles:
    """Cut the rows of each expert into tiles; ``num_rows`` is M, known on the host."""
    num_experts = row_offsets.shape[0] - 1
    # sum of ceil(count / block_m) over at most min(E, M) experts that have rows
    bound = (num_rows + (block_m - 1) * min(num_experts, num_rows)) // block_m
    tiles_E = (row_offsets.diff() + block_m - 1) // block_m
    offsets = torch.nn.functional.pad(tiles_E.cumsum(0), (1, 0)).int()
    tile = torch.arange(bound, device=row_offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets[1:].contiguous(), tile, right=True, out_int32=True)
    expert = expert.clamp(max=num_experts - 1)
    first_row = row_offsets[expert] + (tile - offsets[expert]) * block_m
    return RowTiles(expert, first_row.int(), offsets, bound)
