"""The first half of a verification: names, shapes and values of the tensors, without the model."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from k3tune.errors import AdapterError
from k3tune.lora.export import faults
from k3tune.lora.export.faults import FaultList
from k3tune.lora.export.layout import SHARED_HALF
from k3tune.lora.export.stream import DIGESTS_NAME, digest_of, read_digests
from k3tune.lora.keys import FactorName, parse_key
from k3tune.lora.modules import ModuleShape
from k3tune.lora.plan import listed
from k3tune.lora.read import AdapterFiles, FactorReader, all_finite
from k3tune.lora.targets import layer_of, matching_value, near_names
from k3tune.published.safetensors_files import StoredTensor

Named = dict[tuple[str, int | None], dict[str, tuple[str, StoredTensor]]]


def check_structure(
    files: AdapterFiles,
    shapes: Mapping[str, ModuleShape],
    expected: Collection[str],
    version: int | None,
    reader: FactorReader,
    found: FaultList,
) -> None:
    """Check that every tensor has a place in the base, and every place its tensor.

    Args:
        files: the adapter.
        shapes: of the base's modules.
        expected: modules that must be there, as far as that is known.
        version: of the adapter; at 0 all B may be zero.
        reader: to read values with.
        found: gets the faults.
    """
    named = _names(files, shapes, found)
    _check_modules(named, expected, found)
    for (module, expert), halves in named.items():
        owner = FactorName(module, expert, "A").owner
        _check_shapes(owner, halves, files, shapes[module], expert, found)
    stacked_for = (files.metadata or {}).get("export", {}).get("format")
    if stacked_for in ("vllm", "sglang"):
        _check_shared(named, shapes, reader, found)
    if found.names() & {faults.FILE_TRUNCATED, faults.FILE_DAMAGED}:
        return
    _check_values(files, version, reader, found)


def _names(files: AdapterFiles, shapes: Mapping[str, ModuleShape], found: FaultList) -> Named:
    named: Named = {}
    known = None
    for key, stored in files.tensors.items():
        factor = parse_key(key)
        shape = None if factor is None else shapes.get(factor.module)
        if factor is None or shape is None or (factor.expert or 0) >= (shape.num_experts or 1):
            if known is None:
                known = [FactorName(name, None, half).key for name in shapes for half in "AB"]
            near = near_names(key, known, 1)[0]
            found.add(faults.KEY_MISSPELT, key, f"matches nothing in the base; near is {near}")
            continue
        named.setdefault((factor.module, factor.expert), {})[factor.half] = key, stored
    return named


def _check_modules(named: Named, expected: Collection[str], found: FaultList) -> None:
    there = {module for module, _ in named}
    missing = [module for module in expected if module not in there]
    layers = {layer_of(module) for module in there}
    gone = {layer_of(module) for module in missing} - layers
    for layer in sorted(layer for layer in gone if layer is not None):
        names = [module for module in missing if layer_of(module) == layer]
        found.add(faults.LAYER_MISSING, f"layer {layer}", f"no tensor of {listed(names)}")
    rest = [module for module in missing if layer_of(module) not in gone]
    if rest:
        found.add(faults.FACTOR_MISSING, rest, "no tensor")
    left = sorted(there - set(expected))
    if expected and left:
        found.add(faults.LEFT_OVER, left, "the trained adapter has none")
    by_module: dict[str, dict[str, set[int | None]]] = {}
    for (module, expert), halves in named.items():
        for half in halves:
            by_module.setdefault(module, {"A": set(), "B": set()})[half].add(expert)
    for module, experts in by_module.items():
        for half, other in (("A", "B"), ("B", "A")):
            lost = experts[other] - experts[half] if None not in experts[half] else set()
            lost = {e for e in lost if e is not None or not experts[half]}
            for expert in sorted(lost, key=str):
                key = FactorName(module, expert, half).key
                found.add(faults.FACTOR_MISSING, key, f"lora_{other} is there without it")


def _check_shapes(
    owner: str,
    halves: Mapping[str, tuple[str, StoredTensor]],
    files: AdapterFiles,
    shape: ModuleShape,
    expert: int | None,
    found: FaultList,
) -> None:
    rank = matching_value(files.config.rank_pattern, owner, files.config.r)
    wanted = {"A": (rank, shape.in_features), "B": (shape.out_features, rank)}
    sides = {half: stored.shape[-2:] for half, (_, stored) in halves.items()}
    if all(sides[half] == wanted[half] for half in sides):
        for half, (key, stored) in halves.items():
            _check_stack(half, key, stored, shape, expert, found)
        return
    if len(sides) == 2:
        exchanged = {"A": wanted["B"], "B": wanted["A"]}
        turned = {half: side[::-1] for half, side in exchanged.items()}
        if sides in (exchanged, turned):
            found.add(
                faults.SWAPPED_HALVES, owner, "lora_A has the sides of lora_B, and the reverse"
            )
            return
    for half, (key, stored) in halves.items():
        if sides[half] != wanted[half]:
            smaller = len(sides[half]) == 2 and all(
                side <= full for side, full in zip(sides[half], wanted[half], strict=True)
            )
            name = faults.TRUNCATED_FACTOR if smaller else faults.WRONG_SHAPE
            found.add(name, key, f"expected {wanted[half]}, found {stored.shape}")


def _check_stack(
    half: str,
    key: str,
    stored: StoredTensor,
    shape: ModuleShape,
    expert: int | None,
    found: FaultList,
) -> None:
    total = shape.num_experts
    stackable = total is not None and expert is None
    if len(stored.shape) == 2 or (stackable and stored.shape[0] in (1, total)):
        return
    smaller = stackable and stored.shape[0] < (total or 0)
    name = faults.TRUNCATED_FACTOR if smaller else faults.WRONG_SHAPE
    found.add(name, key, f"expected {total or 'no'} experts in front, found {stored.shape}")


def _check_shared(
    named: Named, shapes: Mapping[str, ModuleShape], reader: FactorReader, found: FaultList
) -> None:
    """Servers keep one matrix where shared-outer experts have one, whatever else is there."""
    for (module, expert), halves in named.items():
        half = SHARED_HALF.get(module.rpartition(".")[2], "")
        total = shapes[module].num_experts
        if total in (None, 1) or expert is not None or half not in halves:
            continue
        key, stored = halves[half]
        if len(stored.shape) != 3 or stored.shape[0] == 1:
            continue
        try:
            first = reader.read_stored(key, stored, 0)
            equal = all(
                torch.equal(reader.read_stored(key, stored, row), first)
                for row in range(1, stored.shape[0])
            )
        except AdapterError:
            continue
        detail = f"expected 1 in front, found {stored.shape}: an engine keeps the first only"
        found.add(faults.SHARED_REPEATED if equal else faults.WRONG_SHAPE, key, detail)


def _check_values(
    files: AdapterFiles, version: int | None, reader: FactorReader, found: FaultList
) -> None:
    """Finite, as hashed when written, and B not zero throughout."""
    digests = _digests(files, found)
    if digests is not None:
        for key in digests.keys() - files.tensors.keys():
            found.add(faults.FACTOR_MISSING, key, f"{DIGESTS_NAME} has it")
        for key in files.tensors.keys() - digests.keys():
            found.add(faults.LEFT_OVER, key, f"{DIGESTS_NAME} has it not")
    zero = True
    for key, stored in files.tensors.items():
        factor = parse_key(key)
        parts = list(reader.chunks(key, stored, check=False)) if stored.size_bytes else []
        if not all(all_finite(part) for part in parts):
            found.add(faults.NOT_FINITE, key, "NaN or infinite values")
        if factor is not None and factor.half == "B" and zero:
            zero = not any(bool(part.any()) for part in parts)
        if digests is not None and key in digests and digest_of(iter(parts)) != digests[key]:
            found.add(faults.TENSOR_CHANGED, key, f"not the SHA-256 of {DIGESTS_NAME}")
    if zero and version != 0:
        found.add(
            faults.ALL_ZERO, str(files.folder), f"no effect at all, though version is {version}"
        )


def _digests(files: AdapterFiles, found: FaultList) -> dict[str, str] | None:
    file = files.folder / DIGESTS_NAME
    if not file.is_file():
        return None
    try:
        return read_digests(file)
    except AdapterError as error:
        found.add(faults.FILE_DAMAGED, str(file), str(error))
        return None


def recorded_modules(metadata: Mapping[str, Any]) -> list[str]:
    """Modules an export says it wrote."""
    export = metadata.get("export") or {}
    zeros = [name for name in export.get("zeros", ()) if "experts." not in name or _is_module(name)]
    return [*export.get("modules", {}), *zeros]


def _is_module(name: str) -> bool:
    parsed = parse_key(f"{name}.lora_A.weight")
    return parsed is not None and parsed.expert is None
