"""Every op and shape that is measured."""

from collections.abc import Callable

import torch
from moe import moe_lora_workload
from small_ops import (
    attention_residual_workload,
    linear_cross_entropy_workload,
    situ_glu_workload,
)
from workload import Shape, Workload

WORKLOADS: dict[str, Callable[[dict[str, int], torch.device, torch.dtype], Workload]] = {
    "moe_lora": moe_lora_workload,
    "situ_glu": situ_glu_workload,
    "attention_residual": attention_residual_workload,
    "linear_cross_entropy": linear_cross_entropy_workload,
}

# K3's expert: latent width 3584, expert width 3072, 16 of 896 experts a token.
_K3 = {"active": 16, "width": 3584, "hidden": 3072, "rank": 16}
# Torch's grouped matmul wants rows of a multiple of 16 bytes, so the rank is no smaller.
_TINY = {"active": 2, "width": 64, "hidden": 96, "rank": 8}


def _moe_shape(
    name: str, base: dict[str, int], experts: int, tokens_per_expert: int, small: bool
) -> Shape:
    sizes = base | {"experts": experts, "tokens_per_expert": tokens_per_expert}
    values = experts * 3 * sizes["width"] * sizes["hidden"]
    rows = experts * tokens_per_expert
    # packed and resident weights, one projection being decoded, and a layer's rows and gradients
    needed = values * (4.25 / 8 + 2 + 4 / 3) + 12 * rows * (sizes["width"] + sizes["hidden"]) * 2
    return Shape("moe_lora", f"{name}, {tokens_per_expert} tokens an expert", sizes, small, needed)


def _k3_moe_shapes() -> list[Shape]:
    """All 896 experts where a pass is bound by weights, an eighth of them where by arithmetic."""
    return [
        _moe_shape(f"K3, {experts} experts", _K3, experts, tokens, small=False)
        for experts, counts in ((896, (1, 4, 16, 64)), (112, (64, 128, 256, 512, 1024, 4096)))
        for tokens in counts
    ]


def _plain_shape(op: str, name: str, small: bool, copies: int, **sizes: int) -> Shape:
    elements = sizes["tokens"] * sizes["width"] * sizes.get("sources", 1)
    logits = sizes["tokens"] * sizes.get("vocabulary", 0)
    head = sizes["width"] * sizes.get("vocabulary", 0)
    needed = 4 * (copies * elements + 4 * logits + 2 * head)
    return Shape(op, f"{name}, {sizes['tokens']} tokens", sizes, small, needed)


SHAPES: tuple[Shape, ...] = (
    _moe_shape("tiny, 8 experts", _TINY, 8, 1, small=True),
    _moe_shape("tiny, 8 experts", _TINY, 8, 16, small=True),
    # one K3 expert's shape, few of them: what a CPU can hold
    _moe_shape("K3, 16 experts", _K3 | {"active": 4}, 16, 16, small=False),
    *_k3_moe_shapes(),
    _plain_shape("situ_glu", "tiny", True, 10, tokens=64, width=96),
    _plain_shape("situ_glu", "K3 shared experts", False, 10, tokens=4096, width=6144),
    _plain_shape("attention_residual", "tiny", True, 6, tokens=64, width=64, sources=3),
    _plain_shape(
        "attention_residual", "K3 output mix", False, 6, tokens=4096, width=7168, sources=9
    ),
    _plain_shape("linear_cross_entropy", "tiny", True, 6, tokens=64, width=64, vocabulary=1000),
    _plain_shape(
        "linear_cross_entropy", "medium head", False, 6, tokens=2048, width=512, vocabulary=32768
    ),
    _plain_shape(
        "linear_cross_entropy", "K3 head", False, 6, tokens=4096, width=7168, vocabulary=163840
    ),
)
