"""What LoRA on the experts costs in time, and what packed experts save in memory, on the CPU.

    python scripts/bench_lora.py time [--base FOLDER] [--rounds 15]
    python scripts/bench_lora.py memory [--experts 896] [--layers 4]

``time`` trains one base with attention-only LoRA and with LoRA on attention and experts, on the
same rows, step by step in turn, and prints the ratio of the medians. ``memory`` makes a small base
whose experts hold nearly all parameters, as K3's do, and compares the peak of a training run on
packed experts with that of the same run over an FP32 bank, each in a process of its own, above what
Python and the imports take; k3-nano, whose activations outweigh its experts, is measured beside it.

Shape letters: ``N`` tokens, ``A`` active experts a token, ``L`` latent width, ``T`` rows of one
expert.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from k3tune.lora import LoraSpec, adapter_parameters, attach_lora  # noqa: E402
from k3tune.lora.inject import base_of  # noqa: E402
from k3tune.model import load_base  # noqa: E402
from k3tune.model.latent_moe import RoutedExperts  # noqa: E402
from k3tune.quant import dequantize  # noqa: E402
from k3tune_kernels.moe_lora import LoraFactors  # noqa: E402
from k3tune_kernels.situ_glu import situ_glu  # noqa: E402

NANO = ROOT / "k3tune" / "assets" / "k3-nano"
RANK = 8
ATTENTION = ("attention",)
WITH_EXPERTS = ("attention", "experts")


def make_run(
    folder: Path,
    targets: tuple[str, ...],
    rows: int,
    tokens: int,
    *,
    dequantised: bool = False,
    checkpointing: bool = False,
) -> Callable[[], float]:
    """Load, adapt, and return a function that takes one optimizer step and answers its loss."""
    torch.manual_seed(0)
    base = load_base(folder, dtype=torch.float32)
    if dequantised:
        _dequantise(base)
    model: Any = attach_lora(base, LoraSpec(targets=targets, rank=RANK, alpha=2 * RANK))
    model.train()
    if checkpointing:
        base_of(model).activation_checkpointing_enable({"use_reentrant": False})
    factors = [factor for group in adapter_parameters(model).values() for factor in group.values()]
    optimizer = torch.optim.AdamW(factors, lr=1e-3)
    ids_BT = torch.randint(0, base.lm_head.out_features, (rows, tokens))

    def step() -> float:
        loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _dequantise(base: nn.Module) -> None:
    """Replace every packed projection by FP32 weights, and its kernels by a product an expert."""
    for experts in [module for module in base.modules() if isinstance(module, RoutedExperts)]:
        for name in ("w1", "w3", "w2"):
            projection = experts.get_submodule(name)
            # not a parameter: the adapter's layer asks the packed ones for its device
            projection.bank = dequantize(projection.packed, projection.scale, dtype=torch.float32)
            for packed in (projection.packed, projection.scale):
                packed.data = torch.empty(0, dtype=torch.uint8)
        experts.forward = _FloatExperts(experts)


class _FloatExperts:
    """The routed experts over FP32 banks: what a trainer computes that dequantises first."""

    def __init__(self, experts: RoutedExperts) -> None:
        self.experts = experts

    def __call__(self, z_NL: Tensor, expert_ids_NA: Tensor, expert_weights_NA: Tensor) -> Tensor:
        out_NL = torch.zeros_like(z_NL)
        for expert in expert_ids_NA.unique().tolist():
            token_T, slot_T = (expert_ids_NA == expert).nonzero(as_tuple=True)
            x_TL = z_NL[token_T]
            gate, up = self._product("w1", expert, x_TL), self._product("w3", expert, x_TL)
            situ = self.experts.situ
            hidden = situ_glu(gate, up, beta=situ.beta, linear_beta=situ.linear_beta)
            y_TL = self._product("w2", expert, hidden)
            weight_T1 = expert_weights_NA[token_T, slot_T, None]
            out_NL = out_NL.index_add(0, token_T, weight_T1 * y_TL)
        return out_NL

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        layer: Any = self.experts.get_submodule(name)
        projection = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        y = F.linear(x, projection.bank[expert])
        factors: LoraFactors | None = layer.factors
        if factors is None:
            return y
        A, B, scaling = factors
        return y + F.linear(F.linear(x, A[expert]), B[expert]) * scaling


def compare_times(folder: Path, rounds: int, rows: int, tokens: int) -> None:
    """Attention-only against attention and experts, in turn."""
    runs = {targets: make_run(folder, targets, rows, tokens) for targets in _TIMED}
    seconds: dict[tuple[str, ...], list[float]] = {targets: [] for targets in runs}
    for number in range(rounds + 2):
        for targets, step in runs.items():
            begin = time.perf_counter()
            step()
            if number >= 2:  # the first ones fill caches
                seconds[targets].append(time.perf_counter() - begin)
    medians = {targets: statistics.median(times) for targets, times in seconds.items()}
    print(f"{torch.get_num_threads()} threads, {rows} x {tokens} tokens, load {_load()}")
    for targets, median in medians.items():
        ratio = median / medians[ATTENTION]
        print(f"LoRA on {', '.join(targets)}: {median * 1e3:.0f} ms a step, {ratio:.2f} x")
    print("goal: attention and experts at most 1.35 x attention")


_TIMED = (ATTENTION, WITH_EXPERTS)


def compare_memory(experts: int, layers: int, rows: int, tokens: int) -> None:
    """Packed against dequantised, on a base of experts and on k3-nano."""
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "experts"
        _make_wide_base(wide, experts, layers)
        for name, base in ((f"{layers} layers of {experts} experts", wide), ("k3-nano", NANO)):
            packed = _peak_bytes(base, rows, tokens, dequantised=False)
            float32 = _peak_bytes(base, rows, tokens, dequantised=True)
            print(
                f"{name}, {rows} x {tokens} tokens: peak above the imports {packed / 1e6:.0f} MB "
                f"packed, {float32 / 1e6:.0f} MB with an FP32 bank: {packed / float32:.2f} x",
                flush=True,
            )
    print("goal: at most 0.45 x")


def _make_wide_base(folder: Path, experts: int, layers: int) -> None:
    from checkpoints import build_checkpoint

    build_checkpoint(
        folder,
        num_hidden_layers=layers,
        mla_layers=[],
        first_k_dense_replace=0,
        num_experts=experts,
        num_experts_per_token=16,
        moe_intermediate_size=256,
        routed_expert_hidden_size=256,
    )


def _peak_bytes(folder: Path, rows: int, tokens: int, *, dequantised: bool) -> int:
    """Peak resident memory of two steps, above the imports, in a process of its own."""
    command = [sys.executable, __file__, "peak", str(folder), str(rows), str(tokens)]
    command += ["--dequantised"] if dequantised else []
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(result.stdout.splitlines()[-1])
    return int(answer["peak"]) - int(answer["imports"])


def _answer_peak(folder: Path, rows: int, tokens: int, *, dequantised: bool) -> None:
    imports = _status_bytes("VmRSS")
    step = make_run(folder, WITH_EXPERTS, rows, tokens, dequantised=dequantised, checkpointing=True)
    losses = [step() for _ in range(2)]
    peak = _status_bytes("VmHWM")
    print(json.dumps({"imports": imports, "peak": peak, "losses": losses}))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("time", help="LoRA on experts against attention only")
    timed.add_argument("--base", type=Path, default=NANO)
    timed.add_argument("--rounds", type=int, default=15)
    memory = commands.add_parser("memory", help="packed experts against an FP32 bank")
    memory.add_argument("--experts", type=int, default=896)
    memory.add_argument("--layers", type=int, default=4)
    for command, rows, tokens in ((timed, 8, 256), (memory, 1, 128)):
        command.add_argument("--rows", type=int, default=rows)
        command.add_argument("--tokens", type=int, default=tokens, help="of a row")
    peak = commands.add_parser("peak")  # what `memory` starts
    peak.add_argument("folder", type=Path)
    peak.add_argument("rows", type=int)
    peak.add_argument("tokens", type=int)
    peak.add_argument("--dequantised", action="store_true")
    options = parser.parse_args()
    if options.command == "time":
        compare_times(options.base, options.rounds, options.rows, options.tokens)
    elif options.command == "memory":
        compare_memory(options.experts, options.layers, options.rows, options.tokens)
    else:
        _answer_peak(options.folder, options.rows, options.tokens, dequantised=options.dequantised)


if __name__ == "__main__":
    main()
