"""Every kernel of the op in every configuration of the table, for compiling ahead of time."""

from collections.abc import Iterator
from typing import Any

from k3tune_kernels.ahead_of_time import Specialization
from k3tune_kernels.moe_lora import configs
from k3tune_kernels.moe_lora.lora_kernels import _lora_gram_kernel, _lora_shrink_kernel
from k3tune_kernels.moe_lora.projection_kernels import (
    _down_bwd_dh_kernel,
    _down_fwd_kernel,
    _gate_up_bwd_dx_kernel,
    _gate_up_fwd_kernel,
)
from k3tune_kernels.moe_lora.row_kernels import _combine_rows_kernel, _dequantise_kernel

_MAPS = {
    "expert_of_tile": "*i32",
    "row_of_tile": "*i32",
    "tile_offsets": "*i32",
    "row_offsets": "*i32",
}
_CHUNK = frozenset({"first_expert", "last_expert"})
_LARGE_TILES = ("many", "large")


def specializations(arch: str) -> list[Specialization]:
    """All kernels for a row of :data:`configs.TABLE`: LoRA on all three projections, rank 16.

    A rank of more than one rank tile (256) is listed for the smallest and the largest row tiles.
    """
    kernels = [*_row_kernels("bf16"), *_row_kernels("fp32")]
    for name, shape_class in configs.TABLE[arch].items():
        for mode in {"large": ["decoded"], "fp32": ["bits", "decoded"]}.get(name, ["scaled"]):
            kernels += _projections(name, shape_class, mode, 16)
        kernels += _lora(name, shape_class, 16)
    for name in ("few", "many"):
        kernels += _projections(name, configs.TABLE[arch][name], "scaled", 256)
        kernels += _lora(name, configs.TABLE[arch][name], 256)
    return kernels


def _projections(
    name: str, shape_class: configs.ShapeClass, mode: str, rank: int
) -> Iterator[Specialization]:
    dtype = "*fp32" if name == "fp32" else "*bf16"
    weight = "*u8" if mode != "decoded" else dtype
    scale = {"*u8": "*u8"}.get(weight)
    chunk = {"first_expert": "i32", "last_expert": "i32"}
    sizes = {"D": "i32", "F": "i32"}
    situ: dict[str, Any] = {"BETA": 4.0, "LINEAR_BETA": 25.0}

    def pair(prefix: str, factor: str) -> dict[str, Any]:
        return {
            f"{prefix}packed": weight,
            f"{prefix}scale": scale,
            f"{prefix}narrow": "*fp32",
            f"{prefix or 'lora_'}{factor}": "*fp32",
            f"{prefix}{factor}_stride": "i32",
        }

    def build(
        label: str, kernel: Any, tile: str, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> Specialization:
        config = shape_class.tiles[tile]
        absent = {key: None for key, kind in arguments.items() if kind is None}
        blocks = {
            "BLOCK_M": shape_class.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "BLOCK_R": configs.rank_block(rank),
            "MODE": mode,
        }
        return Specialization(
            name=f"moe_lora.{label} {name} {mode} rank {rank}",
            kernel=kernel,
            arguments={key: kind for key, kind in arguments.items() if kind is not None},
            constants=constants | blocks | absent,
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
            unaligned=_CHUNK,
            large=name in _LARGE_TILES,
        )

    gate_up = pair("gate_", "B") | pair("up_", "B") | _MAPS | chunk | sizes
    ranks = {"GATE_RANK": rank, "UP_RANK": rank}
    situ["PIECES"] = configs.situ_pieces(shape_class.block_m, shape_class.tiles["gate_up"])
    inputs = {"x": dtype, "token_of_row": "*i32"}
    stored = {"gate_out": dtype, "up_out": dtype}
    yield build(
        "gate_up_fwd",
        _gate_up_fwd_kernel,
        "gate_up",
        inputs | gate_up | {"hidden_out": dtype, "gate_out": None, "up_out": None},
        ranks | situ | {"STORE_GATE_UP": False, "STORE_HIDDEN": True},
    )
    yield build(
        "gate_up_again",
        _gate_up_fwd_kernel,
        "gate_up",
        inputs | gate_up | stored | {"hidden_out": dtype},
        ranks | situ | {"STORE_GATE_UP": True, "STORE_HIDDEN": True},
    )
    down = pair("", "B") | _MAPS | chunk | sizes
    yield build(
        "down_fwd", _down_fwd_kernel, "down", down | {"hidden": dtype, "out": dtype}, {"RANK": rank}
    )
    rows = ("gate", "up", "dy")
    dh = pair("", "A") | _MAPS | chunk | sizes | dict.fromkeys(rows, dtype) | {"M": "i32"}
    situ["PIECES"] = configs.situ_pieces(shape_class.block_m, shape_class.tiles["dh"])
    dh |= {"token_of_row": "*i32", "weight_of_row": "*fp32", "dot_partial": "*fp32"}
    yield build(
        "down_bwd_dh",
        _down_bwd_dh_kernel,
        "dh",
        dh,
        situ | {"RANK": rank},
    )
    dx = pair("gate_", "A") | pair("up_", "A") | _MAPS | chunk | sizes
    dx |= {"d_gate": dtype, "d_up": dtype, "dx_out": dtype}
    yield build("gate_up_bwd_dx", _gate_up_bwd_dx_kernel, "dx", dx, ranks)


def _lora(name: str, shape_class: configs.ShapeClass, rank: int) -> Iterator[Specialization]:
    dtype = "*fp32" if name == "fp32" else "*bf16"
    tile = shape_class.tiles["shrink"]
    pointers = {f"{which}_{part}": "*fp32" for which in ("first", "second") for part in
                ("factor", "scaling", "out")}  # fmt: skip
    integers = ("K", "first_expert_stride", "second_expert_stride", "first_rank_stride",
                "second_rank_stride", "num_experts")  # fmt: skip
    yield Specialization(
        name=f"moe_lora.lora_shrink {name} rank {rank}",
        kernel=_lora_shrink_kernel,
        arguments={"x": dtype, "token_of_row": "*i32"}
        | pointers
        | _MAPS
        | dict.fromkeys(integers, "i32"),
        constants={
            "stride_k": 1,
            "GATHER": True,
            "FIRST_RANK": rank,
            "SECOND_RANK": rank,
            "BLOCK_M": shape_class.block_m,
            "BLOCK_K": tile.block_k,
            "BLOCK_R": configs.rank_block(rank),
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        large=name in _LARGE_TILES,
    )
    tile = shape_class.tiles["gram"]
    yield Specialization(
        name=f"moe_lora.lora_gram {name} rank {rank}",
        kernel=_lora_gram_kernel,
        arguments={
            "narrow": "*fp32",
            "wide": dtype,
            "token_of_row": "*i32",
            "weight_of_row": "*fp32",
            "out": "*fp32",
            "group_offsets": "*i32",
            "W": "i32",
            "out_group_stride": "i32",
            "out_rank_stride": "i32",
        },
        constants={
            "out_wide_stride": 1,
            "GATHER": True,
            "WEIGHTED": True,
            "RANK": rank,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "BLOCK_R": configs.rank_block(rank),
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        large=name in _LARGE_TILES,
    )


def _row_kernels(dtype: str) -> Iterator[Specialization]:
    yield Specialization(
        name=f"moe_lora.combine_rows {dtype}",
        kernel=_combine_rows_kernel,
        arguments={
            "rows": f"*{dtype}",
            "row_of_slot": "*i32",
            "weight_of_slot": "*fp32",
            "out": f"*{dtype}",
            "N": "i32",
            "A": "i32",
            "D": "i32",
        },
        constants={
            "WEIGHTED": True,
            "BLOCK_M": configs.COMBINE["block_m"],
            "BLOCK_N": configs.COMBINE["block_n"],
        },
        options={"num_warps": configs.COMBINE["num_warps"], "num_stages": 3},
        unaligned=frozenset({"N", "A"}),
    )
    yield Specialization(
        name=f"moe_lora.dequantise {dtype}",
        kernel=_dequantise_kernel,
        arguments={
            "packed": "*u8",
            "scale": "*u8",
            "out": f"*{dtype}",
            "num_rows": "i32",
            "in_dim": "i32",
        },
        constants={
            "BLOCK_M": configs.DEQUANTISE["block_m"],
            "BLOCK_N": configs.DEQUANTISE["block_n"],
        },
        options={"num_warps": configs.DEQUANTISE["num_warps"], "num_stages": 3},
    )
