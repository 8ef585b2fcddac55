"""What each engine makes of an adapter directory: its names, its scale, what it keeps and loses.

A reader of its own, on the safetensors library: it shares no code with what wrote the files, so
that one mistake cannot be on both sides of a comparison. It trusts the config as the engines do.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:language_model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight"
)
_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?:(?P<expert>\d+)\.)?(?P<leaf>\w+)")
_OUTER = {"w1": "A", "w3": "A", "w2": "B"}
_TO_PUBLISHED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_TO_TARGET = {leaf: target for target, leaf in _TO_PUBLISHED.items()}


class Effective(NamedTuple):
    """One update: ``scale * B A``, A ``[r, in]``, B ``[out, r]``."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass
class ServedModule:
    """One module as an engine applies it.

    Attributes:
        num_experts: None for a single module.
        read: expert id (None for a single module) -> its update.
        keys: of the files.
    """

    num_experts: int | None
    read: Callable[[int | None], Effective]
    keys: list[str]


@dataclass
class ServedAdapter:
    """An adapter in an engine.

    Attributes:
        modules: by their names in the model.
        lost: tensors that vanish without a message, with the reason.
        refused: why the engine does not load it.
    """

    modules: dict[str, ServedModule] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Entry:
    key: str
    file: Any
    shape: tuple[int, ...]

    def all(self) -> Tensor:
        return self.file.get_tensor(self.key)

    def row(self, index: int) -> Tensor:
        return self.file.get_slice(self.key)[index]


def read_as(consumer: str | None, folder: Path, num_experts: int) -> ServedAdapter:
    """Read a directory by the rules of "peft", "vllm", "sglang", or (None) of k3tune itself."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    entries = _entries(folder, one_file=consumer == "vllm")
    reader = _Reader(config, entries, num_experts)
    rules: dict[str | None, Callable[[], None]] = {
        "peft": reader.as_peft,
        "vllm": reader.as_vllm,
        "sglang": reader.as_sglang,
        None: reader.as_k3tune,
    }
    rules[consumer]()
    return reader.found


def _entries(folder: Path, *, one_file: bool) -> dict[str, _Entry]:
    files = [folder / "adapter_model.safetensors"]
    if not one_file:
        files = sorted(folder.glob("*.safetensors"))
    entries = {}
    for path in files:
        file = safe_open(path, "pt")
        for key in file.keys():
            entries[key] = _Entry(key, file, tuple(file.get_slice(key).get_shape()))
    return entries


@dataclass
class _Owner:
    """Halves under one module name of the files."""

    stack: str
    expert: int | None
    halves: dict[str, _Entry] = field(default_factory=dict)


class _Reader:
    def __init__(
        self, config: Mapping[str, Any], entries: Mapping[str, _Entry], num_experts: int
    ) -> None:
        self.config, self.num_experts = config, num_experts
        self.found = ServedAdapter()
        self.owners: dict[str, _Owner] = {}
        for key, entry in entries.items():
            match = _KEY.fullmatch(key)
            if match is None:
                self.found.refused.append(f"{key} is no name of a LoRA factor")
                continue
            owner = self.owners.setdefault(match["module"], _owner(match["module"]))
            owner.halves[match["half"]] = entry

    # ---- scale ----

    def _pattern(self, field_name: str, owner: str, default: Any) -> Any:
        name = f"language_model.{owner}"
        for pattern, value in (self.config.get(field_name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return self.config[default]

    def _scale(self, owner: str) -> float:
        rank = self._pattern("rank_pattern", owner, "r")
        alpha = self._pattern("alpha_pattern", owner, "lora_alpha")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _plain_scale(self, _: str) -> float:
        return self.config["lora_alpha"] / self.config["r"]

    # ---- the engines ----

    def as_peft(self) -> None:
        """Every module by its own name; ranks as the config says."""
        for name, owner in self.owners.items():
            if any(len(entry.shape) != 2 for entry in owner.halves.values()):
                self.found.refused.append(f"{name}: a stacked factor is no PEFT layer's")
                continue
            rank = self._pattern("rank_pattern", name, "r")
            self._check_rank(name, owner, rank)
        self._modules(self._scale, zeros=True)

    def as_k3tune(self) -> None:
        """Single, stacked and shared factors; the tensors' rank counts."""

        def scale(owner: str) -> float:
            alpha = self._pattern("alpha_pattern", owner, "lora_alpha")
            found = self.owners.get(owner) or self.owners[_whole(owner)]
            entry = next(iter(found.halves.items()))
            rank = entry[1].shape[-2 if entry[0] == "A" else -1]
            return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

        self._modules(scale, zeros=True)

    def as_vllm(self) -> None:
        """Experts packed: complete, of one rank and one scale a projection."""
        ranks = [self.config["r"], *(self.config.get("rank_pattern") or {}).values()]
        if max(ranks) > 512:
            self.found.refused.append(f"rank {max(ranks)} is above 512")
        self._check_experts(_OUTER)

        def scale(owner: str) -> float:
            match = _EXPERT.fullmatch(owner)
            first = owner if match is None else _of_expert(match, 0)
            # a projection's experts are packed with the scale of the first
            return self._scale(owner if match is None or owner in self.owners else first)

        self._modules(scale, zeros=False)

    def as_sglang(self) -> None:
        """Names by their last part, one rank and one scale for all."""
        targets = self.config["target_modules"]
        for name, owner in list(self.owners.items()):
            leaf = name.rpartition(".")[2]
            routed = _EXPERT.fullmatch(name) is not None and "shared_experts" not in name
            target = _TO_TARGET.get(leaf, leaf) if routed else leaf
            if re.search(r"self_attn\.[qkv]_proj$", name):
                self._lose(name, "no layer owns KDA's q, k and v")
            elif "routed_expert_" in name:
                self._lose(name, "the latent projections are refused or collide with down_proj")
            elif target not in targets:
                self._lose(name, f"{target} is not in target_modules")
            else:
                self._check_rank(name, owner, self.config["r"])
        for leaf, other in (("q_a_proj", "kv_a_proj_with_mqa"), ("kv_a_proj_with_mqa", "q_a_proj")):
            for name in [name for name in self.owners if name.endswith(f".{leaf}")]:
                if f"{name.removesuffix(leaf)}{other}" not in self.owners:
                    self._lose(name, f"{leaf} without {other} is skipped or gets a wrong B")
        self._check_experts(_OUTER)
        self._modules(self._plain_scale, zeros=False)

    # ---- their parts ----

    def _lose(self, name: str, reason: str) -> None:
        for entry in self.owners.pop(name).halves.values():
            self.found.lost[entry.key] = reason

    def _check_rank(self, name: str, owner: _Owner, rank: int) -> None:
        for half, entry in owner.halves.items():
            found = entry.shape[-2 if half == "A" else -1]
            if found != rank:
                self.found.refused.append(
                    f"{name}: lora_{half} has rank {found}, the config says {rank}"
                )

    def _check_experts(self, outer: Mapping[str, str]) -> None:
        stacks: dict[str, set[tuple[str, int | None]]] = {}
        for owner in self.owners.values():
            if owner.stack:
                stack, _, leaf = owner.stack.rpartition(".")
                stacks.setdefault(stack, set()).add((leaf, owner.expert))
        for stack, there in stacks.items():
            stacked = any(expert is None for _, expert in there)
            wanted = {
                (leaf, expert)
                for leaf in outer
                for expert in ([None] if stacked else range(self.num_experts))
            }
            if there != wanted:
                leaf, expert = min(there ^ wanted, key=str)
                self.found.refused.append(
                    f"{stack}: {leaf} of expert {expert} is missing, or stacked and single keys "
                    "are mixed"
                )
            for leaf, half in outer.items() if stacked else ():
                self._check_stack(f"{stack}.{leaf}", half)

    def _check_stack(self, name: str, outer_half: str) -> None:
        for half, entry in self.owners[name].halves.items() if name in self.owners else ():
            wanted = 1 if half == outer_half else self.num_experts
            if len(entry.shape) != 3 or entry.shape[0] != wanted:
                self.found.refused.append(
                    f"{name}: lora_{half} is {entry.shape}, expected {wanted} first"
                )

    def _modules(self, scale: Callable[[str], float], *, zeros: bool) -> None:
        """Group what is left by module; ``zeros``: an expert without factors is not adapted."""
        groups: dict[str, list[_Owner]] = {}
        names: dict[int, str] = {}
        for name, owner in self.owners.items():
            module = owner.stack or name
            groups.setdefault(module, []).append(owner)
            names[id(owner)] = name
        for module, owners in groups.items():
            keys = [entry.key for owner in owners for entry in owner.halves.values()]
            if not owners[0].stack:
                if owners[0].halves.keys() == {"A", "B"}:
                    read = _single(owners[0].halves, scale(module))
                    self.found.modules[module] = ServedModule(None, read, keys)
                continue
            read = self._stacked(module, owners, scale, zeros)
            self.found.modules[module] = ServedModule(self.num_experts, read, keys)

    def _stacked(
        self, module: str, owners: Sequence[_Owner], scale: Callable[[str], float], zeros: bool
    ) -> Callable[[int | None], Effective]:
        whole = next((owner.halves for owner in owners if owner.expert is None), {})
        single = {owner.expert: owner.halves for owner in owners if owner.expert is not None}

        def half_of(half: str, expert: int) -> Tensor | None:
            if half in whole:
                entry = whole[half]
                if len(entry.shape) == 2:
                    return entry.all()
                outer = entry.shape[0] == 1 or (not zeros and _outer_half(module) == half)
                return entry.row(0 if outer else expert)
            entry_of_expert = single.get(expert, {}).get(half)
            return None if entry_of_expert is None else entry_of_expert.all()

        def read(expert: int | None) -> Effective:
            assert expert is not None, f"{module=}"
            A, B = half_of("A", expert), half_of("B", expert)
            if A is None or B is None:
                known = next(iter(single.values()))
                shapes = {half: known[half].all() for half in known}
                A = shapes["A"].new_zeros(shapes["A"].shape) if A is None else A
                B = shapes["B"].new_zeros(shapes["B"].shape[0], A.shape[0]) if B is None else B
                return Effective(A, B, 1.0)
            stack, _, leaf = module.rpartition(".")
            owner = module if not single else f"{stack}.{expert}.{leaf}"
            return Effective(A, B, scale(owner))

        return read


def _owner(name: str) -> _Owner:
    match = _EXPERT.fullmatch(name)
    if match is None or match["leaf"] not in {*_OUTER, *_TO_PUBLISHED}:
        return _Owner("", None)
    leaf = _TO_PUBLISHED.get(match["leaf"], match["leaf"])
    expert = match["expert"]
    return _Owner(f"{match['stack']}.{leaf}", None if expert is None else int(expert))


def _outer_half(module: str) -> str:
    return _OUTER[module.rpartition(".")[2]]


def _whole(owner: str) -> str:
    match = _EXPERT.fullmatch(owner)
    return owner if match is None else f"{match['stack']}.{match['leaf']}"


def _of_expert(match: re.Match[str], expert: int) -> str:
    return f"{match['stack']}.{expert}.{match['leaf']}"


def _single(halves: Mapping[str, _Entry], scale: float) -> Callable[[int | None], Effective]:
    return lambda _: Effective(halves["A"].all(), halves["B"].all(), scale)
