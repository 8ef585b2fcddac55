"""What each process of an expert-parallel job does in these tests; ranks.py starts them.

    python expert_cases.py FOLDER EXPERT_PARALLEL_SIZE PART...

FOLDER holds the base; every part leaves its results there, and test modules compare. ``sft=RUN``
trains the run of ``sft_runs`` of that name, on from its checkpoint if it has one; ``sft=RUN:FORM``
one with the experts' factors in that form.
"""

import gc
import json
import sys
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import layer_runs
import pytest
import rollout_runs
import sft_runs
import torch
import torch.distributed as dist
import trunk_cases
import trunk_run
from expert_runs import (
    BF16_CASE,
    CASES,
    EXACT_CASES,
    Case,
    batches,
    build,
    num_targets,
    optimizer_of,
    part,
    shards_of,
)
from safetensors.torch import save_file
from trl import SFTConfig

from k3tune.arguments import ParallelArguments
from k3tune.errors import CheckpointError, ConfigError, K3TuneError
from k3tune.lora import adapter_parameters, save_adapter
from k3tune.lora.fingerprint import base_digests
from k3tune.lora.inject import base_of
from k3tune.parallel.dispatch import DispatchOptions, ExpertDispatch
from k3tune.parallel.expert_parallel import ExpertParallel, split_groups
from k3tune.parallel.gather import FactorRows
from k3tune.parallel.shards import ExpertShards
from k3tune.parallel.traffic import KINDS, Traffic
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.train import prepare_launch
from k3tune.train.setup import start_expert_parallel


class Job:
    """This process's view of the launch."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @cached_property
    def architecture(self) -> Architecture:
        """Of the base."""
        return parse_config(read_config(self.folder / "base"))

    def start(self, case: Case) -> ExpertParallel | None:
        """The case's expert parallelism; None for a size of 1."""
        if self.size == 1:
            return None
        options = DispatchOptions(deduplicate=case.deduplicate)
        return ExpertParallel(shards_of(case, self.architecture.num_experts, self.size), options)

    def file(self, name: str, *, own: bool = True) -> Path:
        """Where a result of this process goes, or of all."""
        return self.folder / (f"{name}-{self.rank}" if own else name)


def steps(job: Job, case: Case) -> None:
    """The case's five steps under DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    parallel = job.start(case)
    held = None if parallel is None else parallel.experts(job.architecture.moe_layers)
    model = build(job.folder / "base", case, held)
    named = {name: p for group in adapter_parameters(model).values() for name, p in group.items()}
    groups = [{"params": list(named.values()), "name": "all", "target": "all"}]
    if parallel is not None:
        parallel.attach(model)
        groups = split_groups(groups)
    before = base_digests(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": case.clip,
    }
    optimizer = optimizer_of(case, groups)
    with nullcontext() if parallel is None else parallel.starting_engine(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert base_digests(model) == before
    losses, gradients = [], {}
    for batch in batches(case, model):
        output = engine(**part(batch, job.rank, job.world), num_items_in_batch=num_targets(batch))
        engine.backward(output.loss * job.world)
        if not losses:
            gradients = {name: safe_get_full_grad(p).clone() for name, p in named.items()}
        total = output.loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        engine.step()
    rows = None if parallel is None else FactorRows(parallel, model, "default")
    save_file(gradients, job.file(f"{case.name}.gradients"))
    if rows is not None or job.rank == 0:
        path = job.file(f"{case.name}.adapter", own=False)
        save_adapter(model, path, dtype=torch.float32, base_fingerprint="none", gather=rows)
    dtypes = {name: str(p.dtype) for name, p in base_of(model).named_parameters()}
    sent = {} if parallel is None else dict(parallel.traffic.sent)
    facts = {"losses": losses, "dtypes": dtypes, "sent": sent}
    facts["bytes_read"] = base_of(model).load_report.bytes_read
    job.file(f"{case.name}.json").write_text(json.dumps(facts))


def all_steps(job: Job) -> None:
    """Every case of ``expert_runs``."""
    for case in (*CASES, *EXACT_CASES, BF16_CASE):
        steps(job, case)


def layer(job: Job) -> None:
    """One layer's experts called with its own tokens by each process, spread in every way."""
    for name, options in layer_runs.OPTIONS.items():
        placed = layer_runs.PLACED if name == "placed" else {}
        shards = ExpertShards(layer_runs.NUM_EXPERTS, job.size, placed)
        group = ExpertParallel(shards).group
        experts = layer_runs.routed_experts(shards.experts(group.rank, 0))
        traffic = Traffic()
        dispatch = ExpertDispatch(experts, 0, shards, group, options, traffic)
        results = {}
        with layer_runs.Exchanges() as exchanges:
            for tokens, (z, ids, weights) in layer_runs.inputs(job.rank).items():
                z.requires_grad_(), weights.requires_grad_()
                traffic.take()
                out = dispatch(z, ids, weights)
                (out * layer_runs.direction(out)).sum().backward()
                found = {"out": out, "z": z.grad, "weights": weights.grad}
                results |= {f"{tokens}.{key}": value.detach() for key, value in found.items()}
                sent = [traffic.sent[kind] for kind in KINDS]
                results[f"{tokens}.sent"] = torch.tensor(sent)
        save_file(results, job.file(f"layer.{name}"))
        job.file(f"layer.{name}.json").write_text(json.dumps(sorted(exchanges.widths)))


def sft(job: Job) -> None:
    """The SFT trainer from the start, on from one process's checkpoint, and from an unfit one."""
    sft_runs.train(job.folder, "two", job.size, job.world)
    sft_runs.train(job.folder, "one_then_two", job.size, job.world)
    with pytest.raises(CheckpointError, match=r"expected .*: resume with the same LoRA options"):
        sft_runs.train(job.folder, "other_rank", job.size, job.world, rank=3)


def rollout(job: Job) -> None:
    """Sampling where processes have different numbers of forwards to run, or none."""
    parallel = job.start(CASES[0])
    model = build(job.folder / "base", CASES[0], parallel.experts(job.architecture.moe_layers))
    parallel.attach(model)
    job.file("rollout").write_text(json.dumps(rollout_runs.sample(model, job.rank)))


def grpo(job: Job) -> None:
    """The GRPO trainer."""
    rollout_runs.train_grpo(job.folder, "two", job.size, job.world)


def refusals(job: Job) -> None:
    """What must not pass in silence between processes."""
    options = ParallelArguments(expert_parallel_size=2)
    ddp = SimpleNamespace(deepspeed_plugin=None)
    with pytest.raises(ConfigError, match=r"does not use DeepSpeed.*plain DDP would average"):
        start_expert_parallel(job.architecture, ddp, options)
    case = CASES[0]
    other = build(job.folder / "base", case, range(1, 4))
    with pytest.raises(ConfigError, match=r"holds experts .*, expected .* on rank"):
        job.start(case).attach(other)
    parallel = job.start(case)
    model = build(job.folder / "base", case, parallel.experts(job.architecture.moe_layers))
    parallel.attach(model)
    packed = next(p for p in model.parameters() if p.dtype == torch.uint8)
    assert (packed.allreduce, packed.group_name) == (False, "ep_size_2")
    with pytest.raises(K3TuneError, match="DeepSpeed changed the packed experts"):
        with parallel.starting_engine(model):
            packed.view(-1)[-1] ^= 1


def trunk(job: Job) -> None:
    """The trunk spread over the processes: its own cases, on a base of their own."""
    gc.collect()
    run = trunk_run.Run(job.size, job.folder / "trunk")
    trunk_run.run_cases(run, trunk_cases.CASES, [case.__name__ for case in trunk_cases.DEFAULT])


PARTS = {
    "layer": layer,
    "steps": all_steps,
    "refusals": refusals,
    "sft": sft,
    "rollout": rollout,
    "grpo": grpo,
    # last: a case that fails ends the process
    "trunk": trunk,
}


def main(folder: str, size: str, *parts: str) -> None:
    """Run parts one after the other."""
    prepare_launch()
    torch.set_num_threads(1)
    # transformers starts torch.distributed
    assert SFTConfig(folder, use_cpu=True, bf16=False).device.type == "cpu"
    job = Job(Path(folder), int(size))
    for name in parts:
        kind, _, run = name.partition("=")
        if run:
            run, _, form = run.partition(":")
            options = {"form": form} if form else {}
            sft_runs.train(job.folder, run, job.size, job.world, **options)
        else:
            PARTS[kind](job)
        dist.barrier()
        job.file(f"{name}.done").touch()


if __name__ == "__main__":
    # every training run collects garbage: not among all that was imported
    gc.freeze()
    try:
        main(*sys.argv[1:])
    finally:
        gc.unfreeze()
