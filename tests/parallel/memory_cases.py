"""What a process of a job holds that trains on a base whose experts are nearly all of it.

python memory_cases.py FOLDER EXPERT_PARALLEL_SIZE
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from trl import SFTConfig

from k3tune.lora import LoraSpec, adapter_parameters, attach_lora
from k3tune.model import load_base
from k3tune.parallel.expert_parallel import ExpertParallel, split_groups
from k3tune.parallel.shards import ExpertShards
from k3tune.published.architecture import parse_config, read_config
from k3tune.train import prepare_launch


def status_bytes(field: str) -> int:
    """A figure of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main(folder: Path, size: int) -> None:
    """Load, adapt, and take two steps; note peaks beside what is read and held."""
    prepare_launch()
    torch.set_num_threads(1)
    assert SFTConfig(folder, use_cpu=True, bf16=False).device.type == "cpu"
    architecture = parse_config(read_config(folder / "base"))
    parallel = ExpertParallel(ExpertShards(architecture.num_experts, size)) if size > 1 else None
    held = None if parallel is None else parallel.experts(architecture.moe_layers)
    before = status_bytes("VmRSS")
    base = load_base(folder / "base", dtype=torch.bfloat16, experts=held)
    facts = {"loading": status_bytes("VmHWM") - before, "read": base.load_report.bytes_read}
    packed = sum(p.nbytes for p in base.parameters() if p.dtype == torch.uint8)
    facts |= {"experts": packed, "trunk": sum(p.nbytes for p in base.parameters()) - packed}
    model = attach_lora(base, LoraSpec(targets=("attention", "experts"), rank=1, alpha=1)).train()
    base.activation_checkpointing_enable()
    factors = [factor for group in adapter_parameters(model).values() for factor in group.values()]
    groups = [{"params": factors, "name": "all"}]
    if parallel is not None:
        parallel.attach(model)
        groups = split_groups(groups)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1 << 20},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        ids = torch.arange(32)[None] + 8 * step + dist.get_rank()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    facts["training"] = status_bytes("VmHWM") - before
    facts["factors"] = sum(factor.nbytes for factor in factors)
    (folder / f"memory_of_{size}-{dist.get_rank()}").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
