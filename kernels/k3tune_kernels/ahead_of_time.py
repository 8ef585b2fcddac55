"""Compile Triton kernels for GPUs that are not present, and read what came out.

Every op lists its kernels as :class:`Specialization`; the tests and the table of
``kernels/README.md`` compile that list. Needs no GPU: Triton bundles the assemblers. A process with
``TRITON_INTERPRET=1`` cannot compile.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

COMPILED_OPS = ("moe_lora", "situ_glu", "attention_residual", "linear_cross_entropy")
"""Ops that have kernels, and with them a ``specializations`` module."""

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

# Shared memory (LDS) one program may use.
SHARED_LIMIT_BYTES = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}

# Matrix instructions as they appear in PTX or AMD assembly.
MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")


@dataclass(frozen=True)
class Specialization:
    """One kernel as one call would compile it.

    Attributes:
        name: what the reports call it; its part before the first blank names the op and kernel.
        kernel: the ``@triton.jit`` function.
        arguments: type of each run-time argument, as ``"*bf16"``, ``"i32"`` or ``"fp32"``; a tuple
            of types where the argument is a tuple.
        constants: value of each ``tl.constexpr`` argument (``None`` for an absent pointer, too).
        options: ``num_warps`` and ``num_stages``.
        unaligned: run-time integers that are not multiples of 16; pointers always are.
        large: whether the tile is a large one of matrix products, which must reach the newest
            matrix instructions.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=lambda: {"num_warps": 4, "num_stages": 2})
    unaligned: frozenset[str] = frozenset()
    large: bool = False


@dataclass(frozen=True)
class Compiled:
    """What one :class:`Specialization` became on one target."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: Mapping[str, int]


def specializations(op: str, arch: str) -> list[Specialization]:
    """The list that ``k3tune_kernels.<op>.specializations`` gives for a target."""
    module = importlib.import_module(f"k3tune_kernels.{op}.specializations")
    return module.specializations(arch)


def compile_named(op: str, target: str, name: str) -> Compiled:
    """:func:`compile_for` of one entry by its name, for use in another process."""
    listed = {each.name: each for each in specializations(op, target)}
    return compile_for(listed[name], target)


def compile_for(specialization: Specialization, target: str) -> Compiled:
    """Compile one kernel for one of :data:`TARGETS`.

    Raises:
        RuntimeError: if Triton or its assembler refuses the kernel.
    """
    names = specialization.kernel.arg_names
    given = specialization.arguments.keys() | specialization.constants.keys()
    assert set(names) == given, f"{specialization.name}: {set(names) ^ given} on one side only"
    signature = {name: specialization.arguments.get(name, "constexpr") for name in names}
    aligned = {
        place: [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        for place, kind in _places(index, signature[name])
        if kind.startswith("*") or (kind in ("i32", "i64") and name not in specialization.unaligned)
    }
    source = ASTSource(
        specialization.kernel, signature, constexprs=dict(specialization.constants), attrs=aligned
    )
    # Triton 3.10 changes the default of fp fusion; what is measured here is with it on.
    options = dict(specialization.options) | {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    is_cuda = TARGETS[target].backend == "cuda"
    assembly = compiled.asm["ptx" if is_cuda else "amdgcn"]
    registers, spilled = _cuda_usage(compiled.asm["cubin"]) if is_cuda else _amd_usage(assembly)
    counts = {name: assembly.count(name) for name in MATRIX_INSTRUCTIONS if name in assembly}
    return Compiled(registers, spilled, compiled.metadata.shared, counts)


def _places(index: int, kind: str | tuple[str, ...]) -> list[tuple[tuple[int, ...], str]]:
    """Where Triton looks up attributes of an argument, and the type found there."""
    if isinstance(kind, str):
        return [((index,), kind)]
    return [((index, position), element) for position, element in enumerate(kind)]


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory, which are spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = [int(n) for n in re.findall(r"REG:(\d+)", report)]
    stack = [int(n) for n in re.findall(r"STACK:(\d+)", report)]
    local = [int(n) for n in re.findall(r"LOCAL:(\d+)", report)]
    return max(registers), max(stack) + max(local)


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers a lane (accumulation registers included) and bytes of spills."""
    values = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly))
    return int(values["vgpr_count"]), 4 * int(values["vgpr_spill_count"])
