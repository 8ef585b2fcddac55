"""Five steps of one model on one global batch: what a run does alone and expert parallel alike."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoints import build_checkpoint
from k3tune.lora import LoraSpec, adapter_parameters, attach_lora
from k3tune.lora.inject import adapter_layers, base_of, local_experts
from k3tune.lora.layers import LoraPackedProjection
from k3tune.model import load_base
from k3tune.parallel.shards import ExpertShards

STEPS = 5
GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")
LENGTHS = (11, 4, 7, 13, 5, 9, 3, 8)
"""Tokens of the global batch's rows; no two ranks get as many."""
SPLITS = {1: (8,), 2: (5, 3), 4: (3, 1, 2, 2)}
"""Rows of each process."""
PLACED = {1: (1, 0, 1, 0, 1, 0, 1), 2: (1, 1, 0, 1, 0, 0, 1)}


class Case(NamedTuple):
    """One run: the adapter's form, the optimizer, who is routed to whom, and how it is spread."""

    name: str
    form: str = "per_expert"
    optimizer: str = "sgd"
    routing: str = "natural"
    zero_stage: int = 2
    clip: float = 0.0
    placed: bool = False
    deduplicate: bool = False
    checkpointing: bool = False
    dtype: str = "float32"


CASES = (
    Case("sgd", checkpointing=True),
    Case("adamw", optimizer="adamw", routing="idle_expert", zero_stage=1, deduplicate=True),
    Case("shared_sgd", form="shared_outer", routing="idle_rank", clip=0.5),
    Case("shared_adamw", form="shared_outer", optimizer="adamw", placed=True, checkpointing=True),
)
# without fp32's noise, which this random model turns into 3e-6 in single tensors
EXACT_CASES = (
    Case("exact", optimizer="adamw", routing="idle_rank", dtype="float64", checkpointing=True),
    Case("exact_shared", form="shared_outer", dtype="float64", clip=0.5, deduplicate=True),
)

BF16_CASE = Case("bf16", optimizer="adamw", dtype="bfloat16")


def make_base(folder: Path) -> Path:
    """A folder with a base of seven experts, which neither two nor four ranks divide.

    Its gradients in fp32 are 2e-6 from those in fp64; with other seeds it is up to 2e-5.
    """
    shape = {"num_experts": 7, "num_experts_per_token": 3, "num_hidden_layers": 3}
    base = folder / "base"
    return build_checkpoint(base, seed=2, vocab_size=256, mla_layers=[2], **shape).parent


def build(folder, case: Case, experts: Any = None):
    """The model with an adapter whose every factor is live, the same numbers however spread."""
    base = load_base(folder, dtype=getattr(torch, case.dtype), experts=experts)
    spec = LoraSpec(targets=GROUPS, rank=2, alpha=4, form=case.form)
    model = attach_lora(base, spec)
    for name, layer in adapter_layers(model, "default").items():
        packed = isinstance(layer, LoraPackedProjection)
        spread = packed and "B" not in layer.shared.get("default", "")
        _draw_B(layer.factor("default", "B"), name, base, spread)
    model.train()
    if case.checkpointing:
        base.activation_checkpointing_enable()
    return model


def batches(case: Case, base) -> list[dict[str, Any]]:
    """The global batch of each step, padded, with replayed experts where the case asks for it."""
    architecture = base_of(base).model.architecture
    total, active = architecture.num_experts, architecture.num_experts_per_token
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(STEPS):
        width = max(LENGTHS)
        ids = torch.randint(0, 250, (len(LENGTHS), width), generator=generator)
        mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
        labels = torch.where(mask, ids, -100)
        labels[:, :2] = -100
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        # contiguous shards of 7 experts on 2 or 4 ranks: the last ones hold 5 and 6
        choice = {"natural": None, "idle_expert": range(total - 1), "idle_rank": range(active)}
        experts = choice[case.routing]
        if experts is not None:
            shape = (len(architecture.moe_layers), *ids.shape, len(experts))
            scores = torch.rand(shape, generator=generator)
            chosen = scores.topk(active, dim=-1).indices
            batch["routing"] = dict(zip(architecture.moe_layers, chosen, strict=True))
        found.append(batch)
    return found


def part(batch: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """A process's rows, cut to their longest."""
    start = sum(SPLITS[world][:rank])
    rows = slice(start, start + SPLITS[world][rank])
    width = max(LENGTHS[rows])

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows, :width]

    cutting = {key: cut(batch[key]) for key in ("input_ids", "attention_mask", "labels")}
    if "routing" in batch:
        cutting["routing"] = {layer: cut(ids) for layer, ids in batch["routing"].items()}
    return cutting


def num_targets(batch: dict[str, Any]) -> int:
    """Trained tokens of the global batch."""
    return int((batch["labels"][:, 1:] != -100).sum())


def optimizer_of(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The case's optimizer."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.02)
    return torch.optim.AdamW(groups, lr=1e-3)


def run_alone(folder, case: Case, world: int) -> dict[str, Any]:
    """What one process does: losses, gradients of the first step by name, and the trained model.

    It runs the batches of ``world`` processes one after the other: rows padded to another width
    alone can move gradients in fp32 by more than the bounds here.
    """
    model = build(folder, case)
    parameters = {n: p for g in adapter_parameters(model).values() for n, p in g.items()}
    optimizer = optimizer_of(case, [{"params": list(parameters.values())}])
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches(case, model):
        total = 0.0
        for rank in range(world):
            inputs = part(batch, rank, world)
            loss = model(**inputs, num_items_in_batch=num_targets(batch)).loss
            loss.backward()
            total += loss.item()
        if not losses:
            gradients = {name: p.grad.clone() for name, p in parameters.items()}
        losses.append(total)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "model": model}


def shards_of(case: Case, num_experts: int, size: int) -> ExpertShards:
    """Contiguous, or placed for two ranks."""
    return ExpertShards(num_experts, size, PLACED if case.placed and size == 2 else {})


def _draw_B(factor, name: str, base, spread: bool) -> None:
    """Fill B by its name; of experts' rows, those held here."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    shape = list(factor.shape)
    if spread:
        shape[0] = base.model.architecture.num_experts
    whole = torch.randn(shape, generator=generator) * 0.05
    experts = local_experts(base, name) if spread else None
    factor.data.copy_(whole if experts is None else whole[experts])
