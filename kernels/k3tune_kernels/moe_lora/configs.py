"""One configuration for each (kernel, architecture, shape class): data, read by the launcher.

No timing happens at run time: equal inputs take equal configurations in every process. The choices
follow from compiling (no spills, shared memory within the limit, matrix instructions reached) and
are not measured on a GPU yet.

A shape class is the number of tokens an expert can expect, from sizes the host knows; ``"large"``
is the class of weights decoded first.
"""

from typing import NamedTuple

import torch

from k3tune_kernels.dispatch import interpreting


class Tile(NamedTuple):
    """Columns of the output tile, step along the contracted axis, and Triton's two knobs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ShapeClass(NamedTuple):
    """Rows of a tile, shared by the kernels that walk row tiles, and a :class:`Tile` a kernel."""

    block_m: int
    tiles: dict[str, Tile]


KERNELS = ("gate_up", "down", "dh", "dx", "shrink", "gram")

# Most tokens an expert of each class of packed weights; "many" has no upper end.
CLASS_LIMITS = {"few": 16, "some": 64}

# From here on weights are decoded to a scratch chunk by chunk and multiplied as they are.
LARGE_TOKENS_PER_EXPERT = 256

SCRATCH_BYTES = 64 * 1024 * 1024
"""The most that decoded weights may take, all scratch buffers together."""

# The widest rank tile; wider ranks take several.
MAX_BLOCK_R = 32


def _tiles(**tiles: tuple[int, int, int, int]) -> dict[str, Tile]:
    assert tuple(tiles) == KERNELS, f"{tuple(tiles)=}"
    return {name: Tile(*values) for name, values in tiles.items()}


def _alike(block_m: int, *tile: int) -> ShapeClass:
    return ShapeClass(block_m, dict.fromkeys(KERNELS, Tile(*tile)))


_HOPPER = {
    "few": ShapeClass(
        16,
        _tiles(
            gate_up=(64, 128, 4, 3),
            down=(64, 128, 4, 4),
            dh=(64, 64, 4, 4),
            dx=(64, 64, 4, 4),
            shrink=(64, 128, 4, 3),
            gram=(64, 32, 4, 2),
        ),
    ),
    "some": ShapeClass(
        64,
        _tiles(
            gate_up=(64, 128, 4, 3),
            down=(128, 64, 4, 4),
            dh=(64, 64, 4, 3),
            dx=(64, 64, 4, 3),
            shrink=(64, 64, 4, 3),
            gram=(128, 64, 4, 2),
        ),
    ),
    "many": ShapeClass(
        128,
        _tiles(
            gate_up=(64, 128, 8, 3),
            down=(128, 64, 8, 4),
            dh=(64, 64, 8, 4),
            dx=(128, 64, 8, 4),
            shrink=(64, 64, 8, 3),
            gram=(128, 64, 8, 2),
        ),
    ),
    "large": ShapeClass(
        128,
        _tiles(
            gate_up=(128, 64, 8, 4),
            down=(256, 64, 8, 4),
            dh=(64, 64, 8, 4),
            dx=(128, 64, 8, 4),
            shrink=(64, 64, 8, 3),
            gram=(128, 64, 8, 2),
        ),
    ),
    "fp32": ShapeClass(
        32,
        _tiles(
            gate_up=(32, 32, 8, 2),
            down=(32, 32, 4, 2),
            dh=(32, 32, 8, 2),
            dx=(32, 32, 8, 2),
            shrink=(32, 32, 4, 2),
            gram=(32, 32, 4, 2),
        ),
    ),
}

_AMPERE = {
    "few": ShapeClass(
        16,
        _tiles(
            gate_up=(64, 64, 4, 3),
            down=(64, 64, 4, 3),
            dh=(64, 64, 4, 3),
            dx=(64, 64, 4, 3),
            shrink=(64, 64, 4, 3),
            gram=(64, 32, 4, 2),
        ),
    ),
    "some": ShapeClass(
        64,
        _tiles(
            gate_up=(64, 64, 8, 3),
            down=(64, 64, 4, 3),
            dh=(64, 64, 8, 3),
            dx=(64, 64, 4, 3),
            shrink=(64, 64, 4, 3),
            gram=(128, 64, 4, 2),
        ),
    ),
    "many": ShapeClass(
        128,
        _tiles(
            gate_up=(64, 32, 8, 3),
            down=(128, 64, 8, 3),
            dh=(64, 64, 8, 3),
            dx=(128, 64, 8, 3),
            shrink=(64, 64, 8, 3),
            gram=(128, 64, 8, 2),
        ),
    ),
    "large": ShapeClass(
        128,
        _tiles(
            gate_up=(64, 64, 8, 3),
            down=(128, 64, 8, 3),
            dh=(64, 64, 8, 3),
            dx=(64, 64, 8, 3),
            shrink=(64, 64, 8, 3),
            gram=(128, 64, 8, 2),
        ),
    ),
    "fp32": _alike(32, 32, 32, 8, 2),
}

_CDNA = {
    "few": ShapeClass(
        16,
        _tiles(
            gate_up=(64, 64, 4, 2),
            down=(64, 64, 4, 2),
            dh=(64, 64, 4, 2),
            dx=(64, 64, 4, 2),
            shrink=(64, 64, 4, 2),
            gram=(64, 32, 4, 2),
        ),
    ),
    "some": ShapeClass(
        64,
        _tiles(
            gate_up=(64, 64, 4, 2),
            down=(128, 64, 4, 2),
            dh=(64, 64, 4, 2),
            dx=(128, 64, 4, 2),
            shrink=(64, 64, 4, 2),
            gram=(128, 64, 4, 2),
        ),
    ),
    "many": _alike(128, 128, 64, 8, 2),
    "large": _alike(128, 128, 64, 8, 2),
    "fp32": _alike(32, 32, 32, 4, 2),
}

TABLE: dict[str, dict[str, ShapeClass]] = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    # The interpreter's cost is programs times steps; these keep several of each at test sizes.
    "interpreter": {
        "few": _alike(16, 64, 64, 4, 1),
        "some": _alike(32, 128, 64, 4, 1),
        "many": _alike(64, 32, 128, 4, 1),
        "large": _alike(64, 64, 64, 4, 1),
        "fp32": _alike(32, 128, 64, 4, 1),
    },
}

COMBINE = {"block_m": 4, "block_n": 512, "num_warps": 4}
DEQUANTISE = {"block_m": 32, "block_n": 256, "num_warps": 8}

# Programs a multiprocessor where a grid is not one program an item.
PROGRAMS_PER_PROCESSOR = 2


def shape_class(num_rows: int, num_experts: int, dtype: torch.dtype) -> str:
    """Class of a call over packed weights: ``num_rows`` routed rows, ``num_experts`` local."""
    if dtype is torch.float32:
        return "fp32"
    tokens = -(-num_rows // num_experts)
    return next((name for name, limit in CLASS_LIMITS.items() if tokens <= limit), "many")


def decodes_first(num_rows: int, num_experts: int, expert_bytes: int) -> bool:
    """Whether weights go through the scratch, where one expert's gate and up must fit.

    ``expert_bytes`` is the size of one decoded projection of one expert.
    """
    fits = 2 * expert_bytes <= SCRATCH_BYTES
    return fits and num_rows >= LARGE_TOKENS_PER_EXPERT * num_experts


def architecture(device: torch.device) -> str:
    """Row of :data:`TABLE` for a device; newer ones take the nearest that is listed."""
    if device.type == "cpu" and interpreting():
        return "interpreter"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name in TABLE else "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    # Consumer Blackwell (12.x) has the shared memory and the instructions of Ampere.
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def rank_block(rank: int) -> int:
    """Rank tile: the next power of two, within what a dot takes and :data:`MAX_BLOCK_R`."""
    return min(max(16, 1 << (rank - 1).bit_length()), MAX_BLOCK_R)


def situ_pieces(block_m: int, tile: Tile) -> int:
    """Pieces of columns in which an epilogue passes through SiTU-GLU: 8 values a thread in each."""
    values = block_m * tile.block_n // (32 * tile.num_warps)
    return max(1, min(values // 8, tile.block_n // 16))
