"""Single kernels of ``moe_lora`` on small operands, and tiers, for the tests in the interpreter.

Shapes: M rows, D model (latent) dim, F expert hidden dim, E experts.
"""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from k3tune_kernels.moe_lora.launcher import Adapter, Launcher
from k3tune_kernels.moe_lora.operands import PackedWeight
from k3tune_kernels.moe_lora.routing import route
from k3tune_kernels.moe_lora.row_kernels import _dequantise_kernel
from moe_lora_cases import SITU, Case

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
# 4 and 6 times 2^126 pass the range of bf16 and fp32.
FINITE_SCALES = torch.arange(253, dtype=torch.uint8)
NO_LORA = Adapter(None, None, None, 0)


def in_tiers(cases: Mapping[str, Case], *, slow: Collection[str]) -> list[Any]:
    """Cases as parameters named by their keys, some of them in the slow tier."""
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, case in cases.items()
    ]


def launcher_for(
    x: torch.Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight
) -> Launcher:
    """A launcher whose every row is a token of one expert, without LoRA."""
    routing = route(torch.zeros(x.shape[0], 1, dtype=torch.int64), gate.packed.shape[0], None)
    return Launcher(x, routing, [*gate, *up, *down], [NO_LORA] * 3, SITU)


def every_value(rows_of_64: bool) -> PackedWeight:
    """One expert that holds every byte under every finite scale.

    Either ``[64, I]`` (``rows_of_64``) or ``[O, 64]``.
    """
    packed = ALL_BYTES.view(16, 16).expand(253, 16, 16).reshape(253 * 16, 16)
    scale = FINITE_SCALES.repeat_interleave(16).view(-1, 1)
    # 48 more groups of 32 values fill the last row.
    packed = torch.cat([packed, packed[:48]])
    scale = torch.cat([scale, scale[:48]])
    groups = 64 if rows_of_64 else 2
    return PackedWeight(packed.reshape(1, -1, 16 * groups), scale.reshape(1, -1, groups))


def weight_through_forward(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """``W`` as the forward kernel decodes it: gate of the unit vectors, ``[O, I]``."""
    out_dim, in_dim = weight.packed.shape[1], 2 * weight.packed.shape[2]
    down = _blank(in_dim, out_dim)
    launcher = launcher_for(torch.eye(in_dim, dtype=dtype), weight, weight, down)
    gate, up = launcher.rows(out_dim), launcher.rows(out_dim)
    launcher.gate_up(None, None, gate, up, None)
    assert torch.equal(gate, up)
    return gate.T


def weight_through_backward(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """``W`` as the dX kernel decodes it: dx of unit gradients of gate alone, ``[O, I]``."""
    out_dim, in_dim = weight.packed.shape[1], 2 * weight.packed.shape[2]
    x = torch.zeros(out_dim, in_dim, dtype=dtype)
    launcher = launcher_for(x, weight, _blank(out_dim, in_dim), _blank(in_dim, out_dim))
    unit = torch.eye(out_dim, dtype=dtype)
    return launcher.dx(unit, torch.zeros_like(unit), None, None)


def dequantised(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[O, I]`` through the dequantise kernel."""
    num_rows, in_dim = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(num_rows, in_dim, dtype=dtype)
    grid = (-(-num_rows // 512), -(-in_dim // 128))
    _dequantise_kernel[grid](packed, scale, out, num_rows, in_dim, BLOCK_M=512, BLOCK_N=128)
    return out


def _blank(out_dim: int, in_dim: int) -> PackedWeight:
    return PackedWeight(
        torch.zeros(1, out_dim, in_dim // 2, dtype=torch.uint8),
        torch.full((1, out_dim, in_dim // 32), 127, dtype=torch.uint8),
    )
