"""What one benchmark runs: candidates that compute the same thing, and what that costs at least."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

OURS = "k3tune"
PASSES = ("forward", "forward + backward")


@dataclass(frozen=True)
class Cost:
    """The least one pass must do: arithmetic, and bytes moved if each is moved once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Candidate:
    """One way to compute the result.

    Attributes:
        name: as reported.
        run: computes the result from the workload's operands.
        differentiable: whether the backward pass can be run.
        same_as: name of the candidate whose result it must equal before it is timed.
    """

    name: str
    run: Callable[[], torch.Tensor]
    differentiable: bool = True
    same_as: str = OURS


@dataclass(frozen=True)
class Workload:
    """Operands of one shape, and the candidates over them; the first candidate is ours.

    Attributes:
        candidates: ways to compute one result.
        leaves: tensors that get a gradient.
        grad: gradient of the result.
        costs: by name of the pass, of :data:`PASSES`.
        absent: peers that cannot run here, with the reason.
    """

    candidates: Sequence[Candidate]
    leaves: Sequence[torch.Tensor]
    grad: torch.Tensor
    costs: dict[str, Cost]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """A size to measure one op at.

    Attributes:
        op, name: as reported.
        sizes: by name.
        small: whether it belongs to the run every machine can do.
        needed_bytes: memory the operands and the hungriest candidate take, roughly.
    """

    op: str
    name: str
    sizes: dict[str, int]
    small: bool
    needed_bytes: float
