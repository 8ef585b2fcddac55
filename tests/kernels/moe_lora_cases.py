"""Operands for the tests of ``moe_lora``, and an oracle that shares no code with the op.

Shapes: N tokens, A active experts a token, D model (latent) dim, F expert hidden dim, E local
experts, R LoRA rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora
from k3tune_kernels.mxfp4 import encode

SITU = Situ(beta=4.0, linear_beta=25.0)
FORMS = ("per_expert", "shared_outer")


@dataclass(frozen=True)
class Case:
    """Sizes of one call; ``route`` draws the expert ids."""

    num_tokens: int = 24
    active: int = 2
    dim: int = 64
    hidden: int = 96
    num_experts: int = 5
    rank: int = 4
    form: str = "per_expert"
    targets: tuple[str, ...] = ("gate", "up", "down")
    route: str = "spread"
    local: tuple[int, ...] | None = None
    seed: int = 0


@dataclass
class Operands:
    """Arguments of one call of the op, the differentiable ones as leaves."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    packed: tuple[PackedWeight, PackedWeight, PackedWeight]
    lora: MoELora
    local_experts: torch.Tensor | None
    grad_out: torch.Tensor
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leaves = {"x": self.x, "weights": self.weights}
        for name, factors in zip(MoELora._fields, self.lora, strict=True):
            if factors is not None:
                self.leaves |= {f"{name}.A": factors.A, f"{name}.B": factors.B}


def draw_ids(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Expert ids ``[N, A]``: distinct in a row, over global ids where the case has local ones."""
    pool = case.num_experts if case.local is None else max(case.local) + 3
    shape = (case.num_tokens, case.active)
    if case.route == "one":
        return torch.full(shape, 1)
    if case.route == "empty_and_single":
        # Expert 0 sees nothing, the last one token, the others all the rest.
        ids = torch.stack(
            [torch.randperm(pool - 2, generator=generator)[: case.active] + 1] * case.num_tokens
        )
        ids[case.num_tokens // 2, 0] = pool - 1
        return ids
    if case.route == "elsewhere":
        return torch.full(shape, pool + 10)
    assert case.route == "spread", f"{case.route=}"
    rows = [torch.randperm(pool, generator=generator)[: case.active] for _ in range(shape[0])]
    return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.int64)


def build(
    case: Case, dtype: torch.dtype, lora_dtype: torch.dtype, *, scaled: bool = False
) -> Operands:
    """Operands of ``case``; ``scaled`` gives each expert a scaling of its own."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, std: float = 1.0, to: torch.dtype = dtype) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * std
        return values.to(torch.bfloat16).to(to)

    def weight(out_dim: int, in_dim: int) -> PackedWeight:
        drawn = normal(case.num_experts, out_dim, in_dim, std=2 * in_dim**-0.5)
        return PackedWeight(*encode(drawn, scale_rule="ceil"))

    def factors(name: str, out_dim: int, in_dim: int) -> LoraFactors | None:
        if name not in case.targets:
            return None
        shared_outer = case.form == "shared_outer"
        num_A = 1 if shared_outer and name != "down" else case.num_experts
        num_B = 1 if shared_outer and name == "down" else case.num_experts
        A = normal(num_A, case.rank, in_dim, std=in_dim**-0.5, to=lora_dtype)
        B = normal(num_B, out_dim, case.rank, std=case.rank**-0.5, to=lora_dtype)
        scaling = torch.rand(case.num_experts, generator=generator) + 0.5 if scaled else 0.75
        return LoraFactors(A.requires_grad_(), B.requires_grad_(), scaling)

    dim, hidden = case.dim, case.hidden
    score = torch.rand(case.num_tokens, case.active, generator=generator) + 0.1
    weights_dtype = torch.promote_types(dtype, torch.float32)
    return Operands(
        x=normal(case.num_tokens, dim).requires_grad_(),
        ids=draw_ids(case, generator),
        weights=(score / score.sum(1, keepdim=True)).to(weights_dtype).requires_grad_(),
        packed=(weight(hidden, dim), weight(hidden, dim), weight(dim, hidden)),
        lora=MoELora(
            factors("gate", hidden, dim), factors("up", hidden, dim), factors("down", dim, hidden)
        ),
        local_experts=None if case.local is None else torch.tensor(case.local),
        grad_out=normal(case.num_tokens, dim),
    )


def run(operands: Operands, backend: str, **options: object) -> dict[str, torch.Tensor]:
    """Output and every gradient of the op, by name."""
    return differentiate(
        operands,
        operands.leaves,
        lambda: moe_lora(
            operands.x,
            operands.ids,
            operands.weights,
            *operands.packed,
            operands.lora,
            situ=SITU,
            local_experts=operands.local_experts,
            backend=backend,
            **options,
        ),
    )


def oracle(operands: Operands) -> dict[str, torch.Tensor]:
    """Output and every gradient in fp64: every expert on every token, weighted by a mask."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in operands.leaves.items()}
    return differentiate(operands, leaves, lambda: _dense(operands, leaves))


def differentiate(
    operands: Operands, leaves: dict[str, torch.Tensor], call: Callable[[], torch.Tensor]
) -> dict[str, torch.Tensor]:
    out = call()
    grads = torch.autograd.grad(
        out, list(leaves.values()), operands.grad_out.to(out.dtype), allow_unused=True
    )
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    named = zip(leaves, grads, zeros, strict=True)
    return {"out": out.detach()} | {name: z if g is None else g for name, g, z in named}


def _dense(operands: Operands, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(operands.x.shape, dtype=torch.float64)
    for row in range(operands.packed[0].packed.shape[0]):
        expert = row if operands.local_experts is None else operands.local_experts[row]
        gate = _project(operands, leaves, "gate", row, leaves["x"])
        up = _project(operands, leaves, "up", row, leaves["x"])
        linear = SITU.linear_beta * torch.tanh(up / SITU.linear_beta)
        hidden = SITU.beta * torch.tanh(gate / SITU.beta) * torch.sigmoid(gate) * linear
        share = torch.where(operands.ids == expert, leaves["weights"], 0).sum(1, keepdim=True)
        out = out + share * _project(operands, leaves, "down", row, hidden)
    return out


def _project(
    operands: Operands, leaves: dict[str, torch.Tensor], name: str, row: int, x: torch.Tensor
) -> torch.Tensor:
    index = MoELora._fields.index(name)
    y = x @ _unpack(operands.packed[index], row).T
    factors = operands.lora[index]
    if factors is None:
        return y
    A, B = leaves[f"{name}.A"], leaves[f"{name}.B"]
    scaling = factors.scaling[row] if isinstance(factors.scaling, torch.Tensor) else factors.scaling
    return y + float(scaling) * (x @ A[row % len(A)].T) @ B[row % len(B)].T


def _unpack(weight: PackedWeight, row: int) -> torch.Tensor:
    """One expert's weight in fp64, by the format's definition."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack([weight.packed[row] & 15, weight.packed[row] >> 4], -1).flatten(-2).long()
    values = torch.where(nibbles >= 8, -grid[nibbles & 7], grid[nibbles & 7])
    return values * torch.exp2(weight.scale[row].double() - 127).repeat_interleave(32, -1)
