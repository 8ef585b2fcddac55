"""Measure the native CPU kernels: one projection, a layer of K3's experts, and k3-nano's layer.

    python kernels/bench/cpu_moe.py                         # all three, a few minutes
    python kernels/bench/cpu_moe.py --section projection --rounds 30

Candidates take turns, medians are printed, and beside each row the load of the machine: above the
number of threads used, the figures are of a shared machine. Fractions are of the limit
``max(operations / best arithmetic, packed bytes / memory read)``, both measured here first.
"""

import argparse
import contextlib
import itertools
import os
from collections.abc import Callable

import torch
from cpu_ceilings import CpuCeilings, measure
from cpu_kt_kernel import NotHere, kt_kernel
from cpu_peers import ours, passes, resident, with_tokens
from timing import Timing, interleaved

from k3tune_kernels.cpu import products
from k3tune_kernels.mxfp4 import decode

CPU = torch.device("cpu")
# One projection of a K3 expert, and enough copies that none of them stays in a cache.
OUTPUTS, INPUTS, COPIES = 3072, 3584, 12
ROWS = (1, 2, 4, 8, 16, 64, 256)
K3_LAYER = {"experts": 16, "active": 4, "width": 3584, "hidden": 3072, "rank": 8}
NANO_LAYER = {"experts": 32, "active": 4, "width": 96, "hidden": 64, "rank": 8}
BYTES_A_WEIGHT = 17 / 32


def load() -> str:
    """Average number of running processes over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def line(*cells: str) -> None:
    """One row of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def header(*cells: str) -> None:
    """The head of a Markdown table."""
    print()
    line(*cells)
    line(*["---"] * len(cells))


def milliseconds(timing: Timing) -> str:
    """Median and quartiles."""
    return (
        f"{timing.median_s * 1e3:.3g} "
        f"({timing.first_quartile_s * 1e3:.3g} to {timing.third_quartile_s * 1e3:.3g})"
    )


def projection(ceilings: CpuCeilings, rounds: int) -> None:
    """Both products of one weight, against torch over the same weight in bf16."""
    packed = torch.randint(0, 256, (COPIES, OUTPUTS, INPUTS // 2), dtype=torch.uint8)
    scale = torch.randint(118, 121, (COPIES, OUTPUTS, INPUTS // 32), dtype=torch.uint8)
    wide = [decode(p, s) for p, s in zip(packed, scale, strict=True)]
    header("rows", "product", "limit ms", "ours ms", "of limit", "torch bf16 ms", "ratio", "load")
    for rows in ROWS:
        least = max(
            2 * rows * OUTPUTS * INPUTS / ceilings.flops,
            OUTPUTS * INPUTS * BYTES_A_WEIGHT / ceilings.read_bytes,
        )
        for transposed in (False, True):
            x = torch.randn(rows, OUTPUTS if transposed else INPUTS).bfloat16()
            own, other = itertools.cycle(range(COPIES)), itertools.cycle(range(COPIES))

            def packed_product(x=x, turn=own, transposed=transposed) -> torch.Tensor:
                index = next(turn)
                return products.project(x, packed[index], scale[index], transposed=transposed)

            def wide_product(x=x, turn=other, transposed=transposed) -> torch.Tensor:
                weight = wide[next(turn)]
                return x @ (weight if transposed else weight.T)

            timed = interleaved({"ours": packed_product, "torch": wide_product}, CPU, rounds)
            median, torch_median = timed["ours"].median_s, timed["torch"].median_s
            line(
                str(rows),
                "dX" if transposed else "forward",
                f"{least * 1e3:.3f}",
                milliseconds(timed["ours"]),
                f"{least / median:.2f}",
                milliseconds(timed["torch"]),
                f"{torch_median / median:.2f}",
                load(),
            )


def layer(
    name: str, sizes: dict[str, int], tokens: tuple[int, ...], dtype: torch.dtype, rounds: int
) -> None:
    """Forward, and forward with all gradients, of one MoE layer with LoRA."""
    header(name, "pass", "candidate", "ms", "time / ours", "load")
    for count in tokens:
        with contextlib.ExitStack() as stack:
            _layer(stack, sizes, count, dtype, rounds)


def _layer(
    stack: contextlib.ExitStack, sizes: dict[str, int], count: int, dtype: torch.dtype, rounds: int
) -> None:
    o = with_tokens(sizes, count, dtype)
    grad = torch.randn_like(o.x_ND)
    candidates = {
        "ours": passes(o, ours(o, "cpu"), grad),
        "reference": passes(o, ours(o, "reference"), grad),
        f"resident {str(dtype).removeprefix('torch.')}": passes(o, resident(o), grad),
    }
    if dtype is torch.bfloat16:
        try:
            other = stack.enter_context(kt_kernel(sizes, count))
            candidates["kt-kernel MXFP4_SFT, SwiGLU"] = other
        except NotHere as reason:
            line(f"{count} tokens", "", "kt-kernel MXFP4_SFT", str(reason), "", load())
    for index, pass_name in enumerate(("forward", "forward + backward")):
        calls: dict[str, Callable[[], object]] = {
            candidate: pair[index] for candidate, pair in candidates.items()
        }
        timed = interleaved(calls, CPU, rounds)
        for candidate, timing in timed.items():
            line(
                f"{count} tokens",
                pass_name,
                candidate,
                milliseconds(timing),
                f"{timing.median_s / timed['ours'].median_s:.2f}",
                load(),
            )


def main() -> None:
    """Measure the ceilings, then the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("projection", "k3", "nano")
    parser.add_argument("--section", choices=sections, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each candidate")
    arguments = parser.parse_args()
    chosen = arguments.section or sections
    torch.manual_seed(0)
    ceilings = measure()
    print(f"{torch.get_num_threads()} threads: {ceilings}; load {load()}")
    if "projection" in chosen:
        projection(ceilings, arguments.rounds)
    if "k3" in chosen:
        layer(
            "K3, 16 experts",
            K3_LAYER,
            (4, 64, 1024),
            torch.bfloat16,
            max(3, arguments.rounds // 4),
        )
    if "nano" in chosen:
        for dtype in (torch.bfloat16, torch.float32):
            name = f"k3-nano, {str(dtype).removeprefix('torch.')}"
            layer(name, NANO_LAYER, (1, 64, 800, 3200), dtype, arguments.rounds)


if __name__ == "__main__":
    main()
