"""Time the gathers of a sharded trunk beside a layer's work, and the memory they leave behind.

    torchrun --nproc_per_node 8 scripts/bench_trunk.py --config <folder of a config.json>

Lays out the embedding and the first ``--layers`` decoder layers of the config, without weights,
over all processes. A pass opens one unit after the other, as a forward does, and runs ``--tokens``
tokens through a matrix of a layer's size meanwhile. Printed are the times of a pass with the
products alone, the gathers alone and both, what part of the shorter one was hidden, the host's time
a unit, and on a GPU the memory used and reserved at most. Nothing but the trunk is on the device.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from k3tune.model import K3ForCausalLM
from k3tune.model.checkpoint import model_config
from k3tune.parallel.trunk_loading import shard_trunk, trunk_group
from k3tune.published.architecture import read_config


def main() -> None:
    options = parse()
    device = start()
    torch.set_num_threads(1)
    published = json.loads(json.dumps(read_config(options.config)))
    text = published.get("text_config", published)
    text["num_hidden_layers"] = options.layers
    linear = text["linear_attn_config"]
    for name in ("full_attn_layers", "kda_layers"):
        linear[name] = [layer for layer in linear[name] if layer <= options.layers]
    with torch.device("meta"):
        base = K3ForCausalLM(model_config(published), experts=[0]).to(torch.bfloat16)
    shards = shard_trunk(
        base.requires_grad_(False), trunk_group(str(dist.get_world_size())), device=device
    )
    size = int((shards.gathered_bytes / len(shards.units) / 2) ** 0.5)
    matrix = torch.zeros(size, size, dtype=torch.bfloat16, device=device)
    tokens = torch.zeros(options.tokens, size, dtype=torch.bfloat16, device=device)

    def one_pass(gathers: bool, products: bool) -> None:
        for name in shards.units:
            if gathers:
                with shards.opened(name):
                    if products:
                        torch.matmul(tokens, matrix)
            elif products:
                torch.matmul(tokens, matrix)

    seconds = {}
    for name, kinds in {"products": (False, True), "gathers": (True, False)}.items():
        seconds[name] = timed(device, options.passes, lambda kinds=kinds: one_pass(*kinds))
    seconds["both"] = timed(device, options.passes, lambda: one_pass(True, True))
    counts = shards.take_counts()
    if dist.get_rank() == 0:
        report(shards, seconds, counts.received_bytes / (2 * (options.passes + 1)), device)
    shards.drop_prefetch()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=10)
    return parser.parse_args()


def start() -> torch.device:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def timed(device: torch.device, passes: int, run) -> float:
    """Seconds of one pass, after one that is not counted."""
    run()
    dist.barrier()
    wait(device)
    begin = time.perf_counter()
    for _ in range(passes):
        run()
    wait(device)
    return (time.perf_counter() - begin) / passes


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(shards, seconds, received, device) -> None:
    for name, value in seconds.items():
        print(f"{name}: {1e3 * value:.2f} ms a pass of {len(shards.units)} units")
    hidden = seconds["products"] + seconds["gathers"] - seconds["both"]
    shorter = min(seconds["products"], seconds["gathers"])
    print(f"hidden: {100 * hidden / shorter:.0f} % of the shorter")
    print(
        f"received: {received / 1e9:.3f} GB a pass, {received / seconds['gathers'] / 1e9:.1f} GB/s"
    )
    print(f"resident: {shards.resident_bytes / 1e9:.3f} GB")
    begin = time.perf_counter()
    for unit in shards.units.values():
        unit.show(torch.empty(unit.layout.full_bytes, dtype=torch.uint8, device=device))
        unit.hide()
    host = (time.perf_counter() - begin) / len(shards.units)
    print(f"host: {1e3 * host:.3f} ms a unit to show and hide its weights")
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        allocated = torch.cuda.max_memory_allocated(device)
        print(f"memory: {allocated / 1e9:.2f} GB used, {reserved / 1e9:.2f} GB reserved at most")


if __name__ == "__main__":
    main()
