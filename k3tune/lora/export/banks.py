"""PEFT's 3-D factors: one A and one B for a bank of all experts, two banks wrapped in each other.

Of a bank of shape ``(E, d1, d2)`` PEFT stores A ``(r * E, x)``, row ``e * r + k`` for rank ``k`` of
expert ``e``, and B ``(y, r * E)``, column ``k * E + e``. Newer releases read a bank as
``(E, out, in)``, so that x is its inputs; older ones as ``(E, in, out)``, and x is its outputs. The
name does not say which, nor which of the two wrapped banks is which: shapes do.

Letters: ``L`` width of the latent, ``F`` of an expert, ``E`` experts, ``r`` rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from torch import Tensor

from k3tune.errors import AdapterError
from k3tune.lora.export.factors import Half, ModuleFactors
from k3tune.lora.keys import parse_key
from k3tune.lora.modules import ModuleShape
from k3tune.lora.read import AdapterConfig, AdapterFiles, FactorReader, stored_dtype
from k3tune.lora.targets import RankAlpha, matching_value
from k3tune.published.safetensors_files import StoredTensor

_BANK = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
# rows of the gate come first in a fused bank, then those of the up projection
_PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class _Bank(NamedTuple):
    """A and B of one wrapper."""

    A: tuple[str, StoredTensor]
    B: tuple[str, StoredTensor]

    @property
    def sides(self) -> tuple[int, int]:
        """The x of A and the y of B."""
        return self.A[1].shape[1], self.B[1].shape[0]


class _Sizes(NamedTuple):
    """L and F."""

    latent: int
    width: int

    def of(self, kind: str) -> tuple[int, int]:
        """Inputs and outputs of a bank."""
        if kind == "down_proj":
            return self.width, self.latent
        return self.latent, 2 * self.width


def bank_keys(files: AdapterFiles) -> set[str]:
    """Keys that are halves of a 3-D bank."""
    found = set()
    for key in files.tensors:
        factor = parse_key(key)
        if factor is not None and factor.expert is None and _BANK.fullmatch(factor.module):
            found.add(key)
    return found


def read_banks(
    files: AdapterFiles, shapes: Mapping[str, ModuleShape], reader: FactorReader
) -> dict[str, ModuleFactors]:
    """Factors of w1, w3 and w2 by module, out of an adapter's banks.

    Args:
        files: with banks only.
        shapes: of the base's modules; empty where it is not known.
        reader: stays open as long as factors are read.

    Raises:
        AdapterError: if the shapes do not tell inputs from outputs, or fit no K3 bank.
    """
    stacks: dict[str, dict[int, dict[str, tuple[str, StoredTensor]]]] = {}
    for key, stored in files.tensors.items():
        factor = parse_key(key)
        match = _BANK.fullmatch(factor.module) if factor else None
        assert factor is not None and match is not None, f"{key=}"
        depth = match[2].count("base_layer")
        stacks.setdefault(match[1], {}).setdefault(depth, {})[factor.half] = key, stored
    named = {stack: _name_banks(stack, found, shapes) for stack, found in stacks.items()}
    inputs_first = _role_order(named)
    modules = {}
    for stack, (banks, sizes) in named.items():
        for kind, bank in banks.items():
            for name, factors in _split(
                stack, kind, bank, sizes, inputs_first, files.config, reader
            ):
                modules[name] = factors
    return modules


def _name_banks(
    stack: str,
    found: Mapping[int, Mapping[str, tuple[str, StoredTensor]]],
    shapes: Mapping[str, ModuleShape],
) -> tuple[dict[str, _Bank], _Sizes]:
    """Which wrapper holds which bank, and L and F."""
    banks = []
    for depth, halves in found.items():
        if halves.keys() != {"A", "B"} or any(len(s.shape) != 2 for _, s in halves.values()):
            raise AdapterError(
                f"{stack}: expected a 2-D lora_A and lora_B of each bank, found at depth {depth} "
                f"{ {half: stored.shape for half, (_, stored) in halves.items()} }"
            )
        banks.append(_Bank(halves["A"], halves["B"]))
    known = shapes.get(f"{stack}.w1")
    candidates = []
    for order in permutations(banks):
        for kinds in (("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)):
            if len(kinds) == len(order):
                named = dict(zip(kinds, order, strict=True))
                sizes = (
                    {_Sizes(known.in_features, known.out_features)} if known else _guesses(named)
                )
                candidates += [(named, size) for size in sizes if _fits(named, size)]
    if len({tuple(named) + tuple(size) for named, size in candidates}) != 1:
        raise AdapterError(
            f"{stack}: banks of sides {[bank.sides for bank in banks]} fit "
            f"{'several K3 bases' if candidates else 'no'} gate_up_proj (L, 2F) and down_proj "
            "(F, L): name the base (--base)"
        )
    return candidates[0]


def _guesses(named: Mapping[str, _Bank]) -> set[_Sizes]:
    if len(named) < 2:
        return set()
    x, y = named["gate_up_proj"].sides
    return {_Sizes(latent, other // 2) for latent, other in ((x, y), (y, x)) if other % 2 == 0}


def _fits(named: Mapping[str, _Bank], sizes: _Sizes) -> bool:
    return all(sorted(bank.sides) == sorted(sizes.of(kind)) for kind, bank in named.items())


def _role_order(named: Mapping[str, tuple[dict[str, _Bank], _Sizes]]) -> bool:
    """Whether A reads the inputs; one release of PEFT wrote the whole file."""
    orders = set()
    for banks, sizes in named.values():
        for kind, bank in banks.items():
            inputs, outputs = sizes.of(kind)
            if inputs != outputs:
                orders.add(bank.sides == (inputs, outputs))
    if len(orders) != 1:
        raise AdapterError(
            f"the banks of {next(iter(named))} do not tell which of A and B reads the inputs: "
            f"{'they disagree' if orders else 'all are square'}"
        )
    return orders.pop()


def _split(
    stack: str,
    kind: str,
    bank: _Bank,
    sizes: _Sizes,
    inputs_first: bool,
    config: AdapterConfig,
    reader: FactorReader,
) -> Iterator[tuple[str, ModuleFactors]]:
    name = f"{stack}.{kind}"
    rank = matching_value(config.rank_pattern, name, config.r)
    alpha = matching_value(config.alpha_pattern, name, config.lora_alpha)
    rows, columns = bank.A[1].shape[0], bank.B[1].shape[1]
    if rows != columns or rows % rank:
        raise AdapterError(
            f"{name}: expected r * E rows of lora_A and columns of lora_B with r = {rank}, found "
            f"{rows} and {columns}"
        )
    total = rows // rank
    inputs, outputs = sizes.of(kind)
    whole = lru_cache(maxsize=2)(reader.read_stored)

    def from_A(expert: int) -> Tensor:
        return whole(*bank.A).view(total, rank, -1)[expert]

    def from_B(expert: int) -> Tensor:
        return whole(*bank.B).view(-1, rank, total)[:, :, expert]

    parts = _PARTS[kind]
    height = outputs // len(parts)
    dtype_A, dtype_B = stored_dtype(bank.A[1]), stored_dtype(bank.B[1])
    for place, leaf in enumerate(parts):
        if inputs_first:
            halves = {
                "A": Half(False, dtype_A, _of_expert(from_A)),
                "B": Half(False, dtype_B, _of_expert(from_B, place * height, height)),
            }
        else:
            halves = {
                "A": Half(False, dtype_B, _of_expert(from_B, transposed=True)),
                "B": Half(False, dtype_A, _of_expert(from_A, place * height, height, True)),
            }
        shape = ModuleShape(inputs, height, total)
        yield f"{stack}.{leaf}", ModuleFactors(shape, halves, RankAlpha(rank, alpha), {})


def _of_expert(
    read: Callable[[int], Tensor],
    start: int = 0,
    count: int | None = None,
    transposed: bool = False,
) -> Callable[[int | None], Tensor]:
    """Read an expert's matrix, or ``count`` of its rows."""

    def matrix(expert: int | None) -> Tensor:
        assert expert is not None, "a bank has an expert's matrices only"
        value = read(expert).T if transposed else read(expert)
        stop = None if count is None else start + count
        return value[start:stop].contiguous()

    return matrix
