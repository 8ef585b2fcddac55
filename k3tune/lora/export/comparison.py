"""The exported factors, as an engine reads them, against the trained ones; what the difference is.

Letters: ``E`` experts, ``R`` rank, ``I`` inputs, ``O`` outputs.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3tune.lora.export import faults
from k3tune.lora.export.factors import AdapterSource
from k3tune.lora.export.faults import FaultList
from k3tune.lora.export.served import ServedAdapter, ServedModule

# Rounding to a dtype of 8, 11 or 24 significant bits moves a value by at most half of these.
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_EXACT = 2.0**-20
# A projection averages rounding over thousands of values; no wrong scale of a LoRA is this near.
_SAME_SCALE = 2e-3
_TWINS = {"w1": "w3", "w3": "w1", "gate_proj": "up_proj", "up_proj": "gate_proj"}


class Update(NamedTuple):
    """``scale * B A`` in fp64: A ``[R, I]``, B ``[O, R]``."""

    A: Tensor
    B: Tensor
    scale: float
    rounding: float = _EXACT


def compare_adapters(served: ServedAdapter, trained: AdapterSource, found: FaultList) -> float:
    """Compare every module; the names of differences go to ``found``.

    Returns:
        The largest relative distance of a factor, rounding included.
    """
    for reason in served.refused:
        found.add(faults.REFUSED, reason.partition(":")[0], reason)
    for key, reason in served.lost.items():
        found.add(faults.LOST, key, reason)
    worst = 0.0
    for name, module in served.modules.items():
        if name in trained.modules:
            worst = max(worst, _compare_module(name, module, trained, found))
        elif any(module.read(e).B.any() for e in _experts(module.num_experts)):
            found.add(faults.LEFT_OVER, name, "the trained adapter has none")
    return worst


def _compare_module(
    name: str, module: ServedModule, trained: AdapterSource, found: FaultList
) -> float:
    worst = 0.0
    for expert in _experts(module.num_experts):
        actual, expected = _served(module, expert), _trained(trained, name, expert)
        shape_A, shape_B = expected.A.shape, expected.B.shape
        if actual.A.shape[1] != shape_A[1] or actual.B.shape[0] != shape_B[0]:
            # the structure has said so
            return worst
        distance, ratio = _distance(actual, expected)
        worst = max(worst, distance)
        if distance > _bound(actual, expected):
            fault, detail = _diagnose(name, module, trained)
            found.add(fault, name, detail)
            return worst
        if abs(ratio - 1) > _SAME_SCALE:
            found.add(*_scale_fault(name, ratio, expected.scale))
            return worst
    return worst


def _bound(actual: Update, expected: Update) -> float:
    """How far factors may be apart: not at all, unless they were narrowed or multiplied."""
    if actual.rounding > expected.rounding:
        return actual.rounding
    rank = min(len(expected.A), len(actual.A))
    ratios = (
        _alike(actual.A[:rank], expected.A[:rank])[1],
        _alike(actual.B[:, :rank], expected.B[:, :rank])[1],
    )
    return actual.rounding if any(abs(ratio - 1) > _SAME_SCALE for ratio in ratios) else _EXACT


def _scale_fault(name: str, ratio: float, scale: float) -> tuple[str, str, str]:
    detail = f"the update is {ratio:.4g} times the trained one, whose scale is {scale:g}"
    if abs(ratio / scale - 1) <= _SAME_SCALE:
        return faults.ALPHA_TWICE, name, detail
    if abs(ratio * scale - 1) <= _SAME_SCALE:
        return faults.ALPHA_NEVER, name, detail
    return faults.WRONG_SCALE, name, detail


def _experts(num_experts: int | None) -> list[int | None]:
    return [None] if num_experts is None else list(range(num_experts))


def _served(module: ServedModule, expert: int | None) -> Update:
    A, B, scale = module.read(expert)
    rounding = max(_ROUNDING.get(half.dtype, _EXACT) for half in (A, B))
    return Update(A.double(), B.double(), scale, rounding)


def _trained(source: AdapterSource, name: str, expert: int | None) -> Update:
    factors = source.modules[name]
    if expert not in factors.adapted:
        A, B = factors.shape.in_features, factors.shape.out_features
        return Update(torch.zeros(1, A).double(), torch.zeros(B, 1).double(), 1.0)
    A_RI, B_OR = (factors.halves[half].read(expert) for half in "AB")
    rounding = max(_ROUNDING.get(half.dtype, _EXACT) for half in (A_RI, B_OR))
    return Update(A_RI.double(), B_OR.double(), source.scaling(name, expert), rounding)


def _distance(actual: Update, expected: Update) -> tuple[float, float]:
    """Relative distance of the factors up to a scale each, and how often the update is in there."""
    rank = min(len(expected.A), len(actual.A))
    if bool(actual.A[rank:].any()) and bool(actual.B[:, rank:].any()):
        return 1.0, 1.0
    if bool(expected.A[rank:].any()) and bool(expected.B[:, rank:].any()):
        return 1.0, 1.0
    if not expected.B.any() or not expected.A.any():
        # no update: whatever the other factor is
        return (1.0 if actual.A.any() and actual.B.any() else 0.0), 1.0
    if not actual.A.any() or not actual.B.any():
        return 1.0, 1.0
    distance_A, ratio_A = _alike(actual.A[:rank], expected.A[:rank])
    distance_B, ratio_B = _alike(actual.B[:, :rank], expected.B[:, :rank])
    ratio = ratio_A * ratio_B * actual.scale / expected.scale
    return max(distance_A, distance_B), ratio


def _alike(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative L2 distance from a multiple of ``expected``, and the multiple."""
    ratio = float((actual * expected).sum() / (expected * expected).sum().clamp_min(1e-300))
    deviation = (actual - ratio * expected).norm() / actual.norm().clamp_min(1e-300)
    return float(deviation), ratio


def _diagnose(name: str, module: ServedModule, trained: AdapterSource) -> tuple[str, str]:
    """Which mistake turns the trained factors into these."""
    experts = _experts(module.num_experts)
    actual = [_served(module, expert) for expert in experts]
    expected = [_trained(trained, name, expert) for expert in experts]
    if _all_alike(actual, [Update(u.B.T, u.A.T, u.scale) for u in expected]):
        return faults.SWAPPED_HALVES, "lora_A holds B transposed, and the reverse"
    parent, _, leaf = name.rpartition(".")
    twin = f"{parent}.{_TWINS.get(leaf, '')}"
    if twin in trained.modules:
        other = [_trained(trained, twin, expert) for expert in experts]
        if _all_alike(actual, other) or _halves_alike(actual, other, expected):
            return faults.SWAPPED_GATE_UP, f"these are the factors of {twin.rpartition('.')[2]}"
    if len(experts) > 1:
        order = _expert_order(actual, expected)
        if order is not None:
            return faults.EXPERT_ORDER, f"expert 0 has the factors of expert {order}"
        if _flattened_wrongly(actual, expected):
            return faults.RANK_ORDER, "ranks and experts are flattened in the other order"
    return faults.WRONG_VALUES, "the values are not the trained ones"


def _all_alike(actual: list[Update], expected: list[Update]) -> bool:
    return all(
        a.A.shape == e.A.shape and a.B.shape == e.B.shape and _distance(a, e)[0] <= a.rounding
        for a, e in zip(actual, expected, strict=True)
    )


def _halves_alike(actual: list[Update], twin: list[Update], own: list[Update]) -> bool:
    """Whether only B, or only A, is the twin's."""
    mixed = [
        [Update(t.A, o.B, o.scale) for t, o in zip(twin, own, strict=True)],
        [Update(o.A, t.B, o.scale) for t, o in zip(twin, own, strict=True)],
    ]
    return any(_all_alike(actual, candidate) for candidate in mixed)


def _expert_order(actual: list[Update], expected: list[Update]) -> int | None:
    """The k for which expert e has the factors of expert e + k; either half alone counts too."""
    total = len(actual)
    pickers: list[Callable[[Update, Update], Update]] = [
        lambda own, other: other,
        lambda own, other: Update(own.A, other.B, other.scale),
        lambda own, other: Update(other.A, own.B, own.scale),
    ]
    for pick in pickers:
        for shift in range(1, total):
            rotated = [pick(expected[e], expected[(e + shift) % total]) for e in range(total)]
            if _all_alike(actual, rotated):
                return shift
    return None


def _flattened_wrongly(actual: list[Update], expected: list[Update]) -> bool:
    """Whether A, B or both went through PEFT's flat form with ranks and experts exchanged."""
    A_ERI = torch.stack([u.A for u in expected])
    B_EOR = torch.stack([u.B for u in expected])
    total, rank, _ = A_ERI.shape
    flat_A = A_ERI.flatten(0, 1)
    flat_B = B_EOR.permute(1, 2, 0).flatten(1)
    wrong_A = [
        flat_A.view(rank, total, -1).transpose(0, 1),
        A_ERI.transpose(0, 1).reshape(total, rank, -1),
    ]
    wrong_B = [
        flat_B.view(-1, total, rank).transpose(0, 1),
        B_EOR.permute(1, 0, 2).reshape(-1, rank, total).permute(2, 0, 1),
    ]
    for A in (A_ERI, *wrong_A):
        for B in (B_EOR, *wrong_B):
            if A is A_ERI and B is B_EOR:
                continue
            candidate = [Update(A[e], B[e], expected[e].scale) for e in range(total)]
            if _all_alike(actual, candidate):
                return True
    return False


def dropped_modules(export: Mapping[str, Mapping[str, list[str]]]) -> set[str]:
    """Modules an export was told to leave out."""
    return {name for names in export.get("dropped", {}).values() for name in names}
