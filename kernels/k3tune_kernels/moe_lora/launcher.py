"""Launches the kernels of one call over its routed rows.

Shapes: N tokens, A active experts a token, M = N * A routed rows, D model (latent) dim, F expert
hidden dim, E local experts, R LoRA rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton

from k3tune_kernels.moe_lora import configs
from k3tune_kernels.moe_lora.lora_kernels import _lora_gram_kernel, _lora_shrink_kernel
from k3tune_kernels.moe_lora.operands import PackedWeight, Situ
from k3tune_kernels.moe_lora.projection_kernels import (
    _down_bwd_dh_kernel,
    _down_fwd_kernel,
    _gate_up_bwd_dx_kernel,
    _gate_up_fwd_kernel,
)
from k3tune_kernels.moe_lora.routing import Routing, RowTiles, row_tiles
from k3tune_kernels.moe_lora.row_kernels import _combine_rows_kernel, _dequantise_kernel

# Bounds on the partial Gram products of a factor that all experts share.
_MOST_PARTIALS = 64
_ROWS_PER_PARTIAL = 512
_PARTIAL_BYTES = 64 * 1024 * 1024


class Adapter(NamedTuple):
    """LoRA of one projection as the kernels take it; rank 0 is none."""

    A: torch.Tensor | None
    B: torch.Tensor | None
    scaling_E: torch.Tensor | None
    rank: int

    def stride(self, factor: torch.Tensor | None) -> int:
        """Elements from one expert's factor to the next; 0 where all share it."""
        return 0 if factor is None or factor.shape[0] == 1 else factor.stride(0)


class Launcher:
    """Launches the kernels of one call: its sizes, configuration and row tiles."""

    def __init__(
        self,
        x_ND: torch.Tensor,
        routing: Routing,
        packed: Sequence[torch.Tensor],
        lora: Sequence[Adapter],
        situ: Situ,
    ) -> None:
        self.x = x_ND
        self.routing = routing
        self.gate, self.up, self.down = (PackedWeight(*packed[i : i + 2]) for i in (0, 2, 4))
        self.lora = lora
        self.situ = situ
        self.num_experts, self.F, _ = self.gate.packed.shape
        self.D = x_ND.shape[1]
        self.M = routing.order_M.shape[0]
        arch = configs.architecture(x_ND.device)
        self.decodes = configs.decodes_first(self.M, self.num_experts, self._expert_bytes())
        shape_class = configs.shape_class(self.M, self.num_experts, x_ND.dtype)
        if self.decodes and x_ND.dtype is torch.bfloat16:
            shape_class = "large"
        self.config = configs.TABLE[arch][shape_class]
        self.tiles: RowTiles = row_tiles(routing.row_offsets, self.M, self.config.block_m)

    def _expert_bytes(self) -> int:
        return self.F * self.D * self.x.element_size()

    def rows(self, width: int) -> torch.Tensor:
        """An uninitialised ``[M, width]`` in the dtype of x."""
        return torch.empty(self.M, width, dtype=self.x.dtype, device=self.x.device)

    def gate_up(
        self,
        gate_narrow: torch.Tensor | None,
        up_narrow: torch.Tensor | None,
        gate_out: torch.Tensor | None,
        up_out: torch.Tensor | None,
        hidden_out: torch.Tensor | None,
    ) -> None:
        """Gate and up of every row, their activation, or both, into the buffers given."""
        gate_lora, up_lora, _ = self.lora

        def launch(grid: Any, first: int, last: int, weights: list[torch.Tensor], mode: str):
            _gate_up_fwd_kernel[grid](
                self.x,
                self.routing.token_M,
                *weights,
                gate_narrow,
                gate_lora.B,
                up_narrow,
                up_lora.B,
                gate_out,
                up_out,
                hidden_out,
                *self._maps(),
                first,
                last,
                self.D,
                self.F,
                gate_lora.stride(gate_lora.B),
                up_lora.stride(up_lora.B),
                GATE_RANK=gate_lora.rank,
                UP_RANK=up_lora.rank,
                BETA=self.situ.beta,
                LINEAR_BETA=self.situ.linear_beta,
                STORE_GATE_UP=gate_out is not None,
                STORE_HIDDEN=hidden_out is not None,
                PIECES=configs.situ_pieces(self.config.block_m, self.config.tiles["gate_up"]),
                MODE=mode,
                **self._blocks("gate_up", max(gate_lora.rank, up_lora.rank)),
            )

        self._over_experts("gate_up", self.F, [self.gate, self.up], launch)

    def down_forward(self, hidden: torch.Tensor, narrow: torch.Tensor | None) -> torch.Tensor:
        """Expert outputs ``[M, D]``."""
        out = self.rows(self.D)
        lora = self.lora[2]

        def launch(grid: Any, first: int, last: int, weights: list[torch.Tensor], mode: str):
            _down_fwd_kernel[grid](
                hidden,
                *weights,
                narrow,
                lora.B,
                out,
                *self._maps(),
                first,
                last,
                self.D,
                self.F,
                lora.stride(lora.B),
                RANK=lora.rank,
                MODE=mode,
                **self._blocks("down", lora.rank),
            )

        self._over_experts("down", self.D, [self.down], launch)
        return out

    def down_backward(
        self,
        dy_ND: torch.Tensor,
        weight_M: torch.Tensor,
        narrow: torch.Tensor | None,
        gate: torch.Tensor,
        up: torch.Tensor,
    ) -> torch.Tensor:
        """Turn gate and up into their gradients; gradient of the routing weights ``[M]``."""
        lora = self.lora[2]
        columns = triton.cdiv(self.F, self.config.tiles["dh"].block_n)
        pieces = configs.situ_pieces(self.config.block_m, self.config.tiles["dh"])
        partial = torch.empty(columns, self.M, dtype=torch.float32, device=self.x.device)

        def launch(grid: Any, first: int, last: int, weights: list[torch.Tensor], mode: str):
            _down_bwd_dh_kernel[grid](
                dy_ND,
                self.routing.token_M,
                weight_M,
                *weights,
                narrow,
                lora.A,
                gate,
                up,
                partial,
                *self._maps(),
                first,
                last,
                self.M,
                self.D,
                self.F,
                lora.stride(lora.A),
                RANK=lora.rank,
                BETA=self.situ.beta,
                LINEAR_BETA=self.situ.linear_beta,
                PIECES=pieces,
                MODE=mode,
                **self._blocks("dh", lora.rank),
            )

        self._over_experts("dh", self.F, [self.down], launch)
        return partial.sum(0)

    def dx(
        self,
        d_gate: torch.Tensor,
        d_up: torch.Tensor,
        gate_narrow: torch.Tensor | None,
        up_narrow: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gradient of x by routed row, ``[M, D]``."""
        out = self.rows(self.D)
        gate_lora, up_lora, _ = self.lora

        def launch(grid: Any, first: int, last: int, weights: list[torch.Tensor], mode: str):
            _gate_up_bwd_dx_kernel[grid](
                d_gate,
                d_up,
                *weights,
                gate_narrow,
                gate_lora.A,
                up_narrow,
                up_lora.A,
                out,
                *self._maps(),
                first,
                last,
                self.D,
                self.F,
                gate_lora.stride(gate_lora.A),
                up_lora.stride(up_lora.A),
                GATE_RANK=gate_lora.rank,
                UP_RANK=up_lora.rank,
                MODE=mode,
                **self._blocks("dx", max(gate_lora.rank, up_lora.rank)),
            )

        self._over_experts("dx", self.D, [self.gate, self.up], launch)
        return out

    def shrink_x(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``scaling * x A^T`` of gate and of up, fp32 ``[M, R]``; one read of x for both."""
        gate, up, _ = self.lora
        if gate.rank and up.rank:
            return self._shrink(self.x, True, gate, up, transposed=False)
        if gate.rank:
            return self._shrink(self.x, True, gate, None, transposed=False)[0], None
        if up.rank:
            return None, self._shrink(self.x, True, up, None, transposed=False)[0]
        return None, None

    def shrink(
        self, rows: torch.Tensor, lora: Adapter, *, gather: bool, transposed: bool
    ) -> torch.Tensor | None:
        """``scaling * rows A^T``, or ``scaling * rows B`` if transposed; ``None`` without LoRA."""
        if not lora.rank:
            return None
        return self._shrink(rows, gather, lora, None, transposed=transposed)[0]

    def _shrink(
        self,
        rows: torch.Tensor,
        gather: bool,
        first: Adapter,
        second: Adapter | None,
        *,
        transposed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        outs = [
            None
            if lora is None
            else torch.empty(self.M, lora.rank, dtype=torch.float32, device=self.x.device)
            for lora in (first, second)
        ]
        factors = [
            None if lora is None else (lora.B if transposed else lora.A) for lora in (first, second)
        ]
        ranks = [0 if lora is None else lora.rank for lora in (first, second)]
        width = rows.shape[1]
        # A is [R, K]; B, contracted over its outputs, is [K, R].
        stride_k = ranks[0] if transposed else 1
        rank_strides = [1 if transposed else width] * 2
        tile = self.config.tiles["shrink"]
        block_r = configs.rank_block(max(ranks))
        _lora_shrink_kernel[(self.tiles.bound, triton.cdiv(max(ranks), block_r))](
            rows,
            self.routing.token_M,
            factors[0],
            first.scaling_E,
            outs[0],
            factors[1],
            None if second is None else second.scaling_E,
            outs[1],
            *self._maps(),
            self.num_experts,
            width,
            first.stride(factors[0]),
            0 if second is None else second.stride(factors[1]),
            stride_k,
            *rank_strides,
            GATHER=gather,
            FIRST_RANK=ranks[0],
            SECOND_RANK=ranks[1],
            BLOCK_M=self.config.block_m,
            BLOCK_K=tile.block_k,
            BLOCK_R=block_r,
            **_options(tile),
        )
        assert outs[0] is not None, "the first factor is always there"
        return outs[0], outs[1]

    def gram(
        self,
        factor: torch.Tensor,
        narrow: torch.Tensor,
        wide: torch.Tensor,
        *,
        of_A: bool,
        gather: bool,
        weight_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gradient of a factor: of A ``[., R, W]``, else of B ``[., W, R]``, in its dtype."""
        rank, width = narrow.shape[1], wide.shape[1]
        offsets = self.routing.row_offsets
        dtype = factor.dtype if self.x.dtype is torch.bfloat16 else torch.float32
        shared = factor.shape[0] == 1
        if shared:
            # One sum over all rows would be one program's: split it, and add the parts.
            most = min(_MOST_PARTIALS, _PARTIAL_BYTES // (4 * rank * width))
            parts = max(1, min(most, triton.cdiv(self.M, _ROWS_PER_PARTIAL)))
            cuts = torch.arange(parts + 1, device=offsets.device)
            offsets, dtype = (cuts * offsets[-1] // parts).int(), torch.float32
        groups = offsets.shape[0] - 1
        out = torch.empty(groups, *factor.shape[1:], dtype=dtype, device=factor.device)
        wide_stride, rank_stride = (1, width) if of_A else (rank, 1)
        tile = self.config.tiles["gram"]
        block_r = configs.rank_block(rank)
        grid = (triton.cdiv(width, tile.block_n), triton.cdiv(rank, block_r), groups)
        _lora_gram_kernel[grid](
            narrow,
            wide,
            self.routing.token_M,
            weight_M,
            out,
            offsets,
            width,
            out.stride(0),
            wide_stride,
            rank_stride,
            GATHER=gather,
            WEIGHTED=weight_M is not None,
            RANK=rank,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            BLOCK_R=block_r,
            **_options(tile),
        )
        return (out.sum(0, keepdim=True) if shared else out).to(factor.dtype)

    def combine(self, rows: torch.Tensor, weights_NA: torch.Tensor | None) -> torch.Tensor:
        """Sum of each token's rows in the order of their experts' ids, ``[N, D]``."""
        num_tokens, active = self.routing.row_NA.shape
        out = torch.empty(num_tokens, self.D, dtype=self.x.dtype, device=self.x.device)
        block_m, block_n = configs.COMBINE["block_m"], configs.COMBINE["block_n"]
        _combine_rows_kernel[(triton.cdiv(num_tokens, block_m), triton.cdiv(self.D, block_n))](
            rows,
            self.routing.row_NA,
            weights_NA,
            out,
            num_tokens,
            active,
            self.D,
            WEIGHTED=weights_NA is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=configs.COMBINE["num_warps"],
            enable_fp_fusion=True,
        )
        return out

    def _maps(self) -> tuple[torch.Tensor, ...]:
        tiles = self.tiles
        return tiles.expert, tiles.first_row, tiles.offsets, self.routing.row_offsets

    def _blocks(self, kernel: str, rank: int) -> dict[str, int]:
        tile = self.config.tiles[kernel]
        return {
            "BLOCK_M": self.config.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "BLOCK_R": configs.rank_block(max(rank, 1)),
            **_options(tile),
        }

    def _over_experts(
        self, kernel: str, width: int, weights: list[PackedWeight], launch: Callable[..., None]
    ) -> None:
        """One launch over packed weights, or one a chunk of experts decoded to the scratch."""
        items = self.tiles.bound * triton.cdiv(width, self.config.tiles[kernel].block_n)
        if not self.decodes:
            mode = "scaled" if self.x.dtype is torch.bfloat16 else "bits"
            launch((items,), 0, self.num_experts, [t for w in weights for t in w], mode)
            return
        for first, last, scratch in self._decoded(weights):
            operands = [t for decoded in scratch for t in (decoded, None)]
            launch((min(items, self._resident_programs()),), first, last, operands, "decoded")

    def _resident_programs(self) -> int:
        """Programs that walk a chunk's items; how many items it has only the device knows."""
        if self.x.device.type == "cpu":
            return configs.PROGRAMS_PER_PROCESSOR
        properties = torch.cuda.get_device_properties(self.x.device)
        return configs.PROGRAMS_PER_PROCESSOR * properties.multi_processor_count

    def _decoded(
        self, weights: list[PackedWeight]
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Chunks of experts and their decoded weights, in one scratch reused by every chunk."""
        chunk = configs.SCRATCH_BYTES // (len(weights) * self._expert_bytes())
        chunk = min(chunk, self.num_experts)
        shapes = [(chunk, w.packed.shape[1], 2 * w.packed.shape[2]) for w in weights]
        device, dtype = self.x.device, self.x.dtype
        scratch = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        block_m, block_n = configs.DEQUANTISE["block_m"], configs.DEQUANTISE["block_n"]
        for first in range(0, self.num_experts, chunk):
            last = min(first + chunk, self.num_experts)
            for weight, out in zip(weights, scratch, strict=True):
                num_rows, width = (last - first) * out.shape[1], out.shape[2]
                _dequantise_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(width, block_n))](
                    weight.packed[first:last],
                    weight.scale[first:last],
                    out,
                    num_rows,
                    width,
                    BLOCK_M=block_m,
                    BLOCK_N=block_n,
                    num_warps=configs.DEQUANTISE["num_warps"],
                    enable_fp_fusion=True,
                )
            yield first, last, scratch


def _options(tile: configs.Tile) -> dict[str, int]:
    # Triton 3.10 changes the default of fp fusion: results must not change with it.
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
