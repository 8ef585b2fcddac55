"""One process of a job with a sharded trunk: what the cases share, and the program around them.

    python trunk_cases.py GROUP_SIZE FOLDER CASE...

Every rank runs every case in order, and stops at the first that fails: the others then wait in a
collective, and stop as their connection breaks. FOLDER holds the base and takes the results.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from k3tune.lora import LoraSpec, attach_lora
from k3tune.model import load_base
from k3tune.parallel.expert_parallel import ExpertParallel, expert_parallel_of, split_groups
from k3tune.parallel.shards import ExpertShards
from k3tune.parallel.trunk_loading import load_sharded_base, trunk_group
from k3tune.parallel.trunk_unit import Unit
from k3tune.published.architecture import parse_config, read_config

STEPS = 5
GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")


class Run:
    """One rank's view of the launch."""

    def __init__(self, size: int, folder: Path):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.folder, self.base = folder, folder / "base"
        self.group = trunk_group(str(size))

    def model(self, sharded, *, dtype=torch.float32, train=True, checkpointing=True, experts=1):
        """A base with an adapter on everything, B not zero; experts over so many ranks."""
        load = partial(load_sharded_base, group=self.group) if sharded else load_base
        parallel = None
        if experts > 1:
            architecture = parse_config(read_config(self.base))
            parallel = ExpertParallel(ExpertShards(architecture.num_experts, experts))
            load = partial(load, experts=parallel.experts(architecture.moe_layers))
        model = attach_lora(load(self.base, dtype=dtype), LoraSpec(targets=GROUPS, rank=2, alpha=4))
        draw_factors(model, 7)
        if parallel is not None:
            parallel.attach(model)
        model.train(train)
        if checkpointing:
            model.get_base_model().activation_checkpointing_enable()
        return model

    def ids(self, step, rows=2, length=11):
        """This rank's tokens of a step."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randint(0, 150, (rows, length), generator=generator)


def draw_factors(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.05, generator=generator)


def factors(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" in n}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def loss_of(model, ids):
    return model(ids, labels=ids, use_cache=False).loss


def gradients(model, loss):
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@contextmanager
def watched_buffers():
    """Counts gathered buffers that are alive, whoever holds them."""
    seen, gather = [], Unit.gather

    def counted(unit):
        found = gather(unit)
        if unit.group is not None:
            seen.append(StorageWeakRef(found.buffer.untyped_storage()))
        watch.peak = max(watch.peak, watch.alive())
        return found

    class watch:
        peak = 0

        @staticmethod
        def alive():
            return sum(not buffer.expired() for buffer in seen)

    Unit.gather = counted
    try:
        yield watch
    finally:
        Unit.gather = gather


def train(run, model, *, stage, bf16=False):
    """Five optimizer steps under DeepSpeed: two micro-batches and a forward beside them each."""
    import deepspeed

    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    if expert_parallel_of(model) is not None:
        groups = split_groups(groups)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms = [], []
    for step in range(STEPS):
        with torch.no_grad():
            losses.append(loss_of(engine, run.ids(step + 50)))
        for micro in range(2):
            loss = loss_of(engine, run.ids(2 * step + micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        norms.append(float(engine.get_global_grad_norm()))
    return torch.stack(losses), norms, factors(model)


def main(cases: Mapping[str, Callable[[Run], None]]) -> None:
    size, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    import deepspeed

    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    deepspeed.init_distributed("gloo")
    run_cases(Run(int(size), Path(folder)), cases, names)
    dist.destroy_process_group()


def run_cases(run: Run, cases: Mapping[str, Callable[[Run], None]], names: Iterable[str]) -> None:
    """Run cases in their order; the first that fails ends this process."""
    for name in names:
        begin = time.process_time()
        result = run.folder / f"{name}-{run.rank}"
        try:
            cases[name](run)
            dist.barrier()
        except BaseException:
            result.with_suffix(".failed").write_text(traceback.format_exc())
            # without a word to the others, who may wait in a collective
            os._exit(1)
        result.with_suffix(".passed").write_text(f"{time.process_time() - begin:.2f} s of CPU")
