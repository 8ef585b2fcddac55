"""What a sharded unit of the trunk takes on a rank: arithmetic only, loads no torch.

The run lays its units out with these functions, and the planner counts with them.
"""

from collections.abc import Iterable

ALIGN = 256
"""Bytes: suits every dtype, vector loads, and what matrix libraries want of an operand."""

TAG_BYTES = 8
"""Each unit ends with its own number, int64, by which a rank sees that all gathered the same."""


def aligned(size: int) -> int:
    """``size`` rounded up to :data:`ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def part_bytes(sizes: Iterable[int], ranks: int) -> int:
    """What each of ``ranks`` ranks keeps of a unit whose weights have these ``sizes`` in bytes."""
    whole = sum(map(aligned, sizes)) + TAG_BYTES
    return aligned(-(-whole // ranks))
