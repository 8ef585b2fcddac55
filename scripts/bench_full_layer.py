"""One MoE layer of Kimi K3 in full size on this machine: load it, run LoRA forward and backward.

    PYTHONPATH=tests:kernels/bench python scripts/bench_full_layer.py FOLDER

Writes a checkpoint of one MoE layer in the published layout to FOLDER (896 experts of random codes,
15.7 GB; the trunk around them is tiny), loads it with ``k3tune.load_base``, deletes the file, times
16, 256 and 1024 tokens, and compares some of them with the reference.

Shape letters: N tokens, A active experts a token, D latent width.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cpu_ceilings import measure
from torch import Tensor

from checkpoints import make_config, make_weights
from k3tune import load_base
from k3tune.published.architecture import parse_config
from k3tune.published.safetensors_files import tensor_bytes
from k3tune.published.tensor_table import TensorSpec, text_tensors
from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora

LATENT, WIDTH, ACTIVE = 3584, 3072, 16
RANK, SCALING = 8, 2.0
TOKENS = (16, 256, 1024)
SAMPLE = 4
SITU = Situ(beta=4.0, linear_beta=25.0)
EXPERT_BYTES = 3 * LATENT * WIDTH * 17 // 32
BF16_EXPERT_BYTES = 3 * LATENT * WIDTH * 2
# Projections read by a step: three forward, gate and up again, three for the gradient of x.
PROJECTIONS_A_STEP = 8
# Beyond the packed bytes: torch, factors and their gradients, activations.
SPARE_BYTES = 3 << 30


class Layer(NamedTuple):
    """What a call of the op takes besides tokens."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    lora: MoELora


def memory(field: str, source: str = "/proc/self/status") -> int:
    """Bytes of a line of a file of /proc."""
    lines = Path(source).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def layer_config(experts: int) -> dict[str, Any]:
    """One MoE layer with K3's experts, in a trunk that is too small to matter."""
    return make_config(
        num_hidden_layers=1,
        mla_layers=[],
        first_k_dense_replace=0,
        attn_res_block_size=1,
        num_experts=experts,
        num_experts_per_token=min(ACTIVE, experts),
        moe_intermediate_size=WIDTH,
        routed_expert_hidden_size=LATENT,
    )


def write_layer(folder: Path, experts: int) -> None:
    """Write config and one safetensors file, an expert's tensor at a time."""
    config = layer_config(experts)
    specs = text_tensors(parse_config(config))
    # of one expert: what depends on their number, the router, is drawn in `content`
    trunk = make_weights(layer_config(1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        shape = tuple(trunk[name].shape) if spec.least_length is not None else spec.shape
        size = tensor_bytes(spec.dtype, shape)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, spec in specs.items():
            file.write(content(spec, trunk.get(name)).contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def content(spec: TensorSpec, trunk: Tensor | None) -> Tensor:
    """One tensor: random codes, exponents that keep activations of order one, or the trunk's."""
    if spec.dtype == "U8":
        is_scale = spec.shape[-1] in (LATENT // 32, WIDTH // 32)
        low, high = (119, 122) if is_scale else (0, 256)
        return torch.randint(low, high, spec.shape, dtype=torch.uint8)
    if trunk is not None and (spec.least_length is not None or trunk.shape == spec.shape):
        return trunk
    dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
    return 0.02 * torch.randn(spec.shape).to(dtype)


def load_layer(folder: Path, experts: int) -> Layer:
    """The experts' bytes through the checkpoint reader, and random factors."""
    packed_bytes = experts * EXPERT_BYTES
    # 5 sets the peak of resident memory back to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.perf_counter()
    model = load_base(folder)
    seconds = time.perf_counter() - begin
    peak = memory("VmHWM")
    print(
        f"load: {seconds:.1f} s, {packed_bytes / seconds / 1e9:.2f} GB/s, peak resident memory "
        f"{peak / 1e9:.2f} GB = {peak / packed_bytes:.3f} x packed (goal: at most 1.15)",
        flush=True,
    )
    bank = model.model.layers[0].block_sparse_moe.experts

    def factors(outputs: int, inputs: int) -> LoraFactors:
        # fp32, as PEFT keeps what it trains
        A = torch.randn(experts, RANK, inputs) / inputs**0.5
        B = torch.randn(experts, outputs, RANK) / RANK**0.5
        return LoraFactors(A.requires_grad_(), B.requires_grad_(), SCALING)

    lora = MoELora(factors(WIDTH, LATENT), factors(WIDTH, LATENT), factors(LATENT, WIDTH))
    return Layer(bank.w1.weight, bank.w3.weight, bank.w2.weight, lora)


def run_tokens(layer: Layer, tokens: int, rounds: int) -> None:
    """Time steps of so many tokens, and compare a sample with the reference."""
    # what a shared machine can do changes within minutes
    ceilings = measure()
    experts = len(layer.gate.packed)
    active = min(ACTIVE, experts)
    x_ND = torch.randn(tokens, LATENT).bfloat16().requires_grad_()
    drawn = torch.rand(tokens, experts).topk(active, dim=1)
    ids_NA, weights_NA = drawn.indices, torch.softmax(drawn.values, 1).requires_grad_()
    grad_ND = torch.randn_like(x_ND)
    leaves = (x_ND, weights_NA, *(t for f in layer.lora if f is not None for t in f[:2]))
    forward_s, step_s = [], []
    gradients: tuple[Tensor, ...] = ()
    for _ in range(rounds + 1):
        gradients = ()  # given back before the clock runs
        begin = time.perf_counter()
        out_ND = moe_lora(x_ND, ids_NA, weights_NA, *layer, situ=SITU, backend="cpu")
        forward_s.append(time.perf_counter() - begin)
        gradients = torch.autograd.grad(out_ND, leaves, grad_ND)
        step_s.append(time.perf_counter() - begin)
    # the first round also fetched pages for the first time
    forward, step = statistics.median(forward_s[1:]), statistics.median(step_s[1:])
    touched = len(ids_NA.unique())
    moved = touched * EXPERT_BYTES * PROJECTIONS_A_STEP / 3
    flops = 2 * LATENT * WIDTH * tokens * active * PROJECTIONS_A_STEP
    limit = max(moved / ceilings.read_bytes, flops / ceilings.flops)
    print(
        f"{tokens} tokens ({touched} experts): forward {forward:.3f} s, forward + backward "
        f"{step:.3f} s, {moved / step / 1e9:.1f} GB/s, {flops / step / 1e9:.0f} GFLOP/s, "
        f"{limit / step:.0%} of the roofline ({limit:.3f} s at {ceilings}), "
        f"peak resident memory {memory('VmHWM') / 1e9:.2f} GB; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    compare(layer, x_ND, ids_NA, weights_NA, grad_ND, out_ND.detach(), gradients[0])


def compare(
    layer: Layer,
    x_ND: Tensor,
    ids_NA: Tensor,
    weights_NA: Tensor,
    grad_ND: Tensor,
    out_ND: Tensor,
    dx_ND: Tensor,
) -> None:
    """Some tokens alone, by the reference in fp32: a token's result depends on no other token."""
    picked = torch.randperm(len(x_ND))[:SAMPLE]
    x = x_ND[picked].detach().float().requires_grad_()
    weights = weights_NA[picked].detach()
    fixed = MoELora(
        *(None if f is None else LoraFactors(f.A.detach(), f.B.detach(), f[2]) for f in layer.lora)
    )
    out = moe_lora(x, ids_NA[picked], weights, *layer[:3], fixed, situ=SITU, backend="reference")
    (dx,) = torch.autograd.grad(out, x, grad_ND[picked].float())
    for name, actual, expected in (("output", out_ND, out), ("dx", dx_ND, dx)):
        expected = expected.detach().double()
        error = (actual[picked].double() - expected).norm() / expected.norm()
        print(
            f"  {name} of {SAMPLE} tokens: relative L2 to the fp32 reference {error:.1e}",
            flush=True,
        )


def main() -> None:
    """Write, load, run, delete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the layer is written; must not exist")
    parser.add_argument("--experts", type=int, default=896, help="fewer for a trial")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each size")
    parser.add_argument("--keep", action="store_true", help="do not delete the folder")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a new folder, it is deleted at the end")
    packed = arguments.experts * EXPERT_BYTES
    free_disk = shutil.disk_usage(arguments.folder.resolve().parent).free
    if free_disk < 1.1 * packed:
        parser.error(f"needs {packed / 1e9:.1f} GB of disk, {free_disk / 1e9:.1f} GB are free")
    available = memory("MemAvailable", "/proc/meminfo")
    if available < packed + SPARE_BYTES:
        needed = (packed + SPARE_BYTES) / 1e9
        parser.error(f"needs {needed:.1f} GB of memory, {available / 1e9:.1f} GB are available")
    torch.manual_seed(0)
    bank, total = arguments.experts * BF16_EXPERT_BYTES, memory("MemTotal", "/proc/meminfo")
    print(
        f"{arguments.experts} experts: {packed / 1e9:.2f} GB packed; in BF16 they are "
        f"{bank / 1e9:.1f} GB"
        + (", which this machine cannot hold" if bank > total else "")
        + f" ({total / 1e9:.1f} GB of memory)",
        flush=True,
    )
    print(f"{torch.get_num_threads()} threads; load {os.getloadavg()[0]:.1f}", flush=True)
    try:
        write_layer(arguments.folder, arguments.experts)
        layer = load_layer(arguments.folder, arguments.experts)
        if not arguments.keep:
            # with the file its pages leave the cache, whose eviction would be part of the steps
            shutil.rmtree(arguments.folder)
        for tokens in TOKENS:
            run_tokens(layer, tokens, arguments.rounds)
    finally:
        if not arguments.keep:
            shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
