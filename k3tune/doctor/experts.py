"""Which implementation the routed experts will take on this machine, without running it."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from k3tune.doctor.finding import Finding
from k3tune.doctor.gpus import Gpu
from k3tune.doctor.machine import Machine
from k3tune.doctor.versions import Lookup, installed
from k3tune_kernels.cpu import build

_AVX512_BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi"}
# What the CPU kernels' code for an instruction set needs, by names of /proc/cpuinfo, best first.
_INSTRUCTION_SETS: dict[str, set[str]] = {
    "amx_bf16": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512_BF16,
    "avx2": {"avx2", "fma"},
    "portable": set(),
}


def path_finding(machine: Machine, gpus: list[Gpu], lookup: Lookup = installed) -> Finding:
    """The experts' path as the hardware and the installed files decide it.

    ``facts["path"]`` is ``triton``, ``cpu`` or ``reference``.
    """
    able = next((gpu for gpu in gpus if gpu.has_kernels), None)
    if able and lookup("triton"):
        return Finding("experts", "ok", _on_gpu(able), None, {"path": "triton", "on": able.name})
    if gpus:
        return Finding(
            "experts",
            "warning",
            "the plain torch reference, slow: "
            + ("triton is not installed" if able else f"{gpus[0].target} has no kernels"),
            "pip install triton" if able else "use an sm_80 or newer GPU",
            {"path": "reference", "on": gpus[0].name},
        )
    obstacle = library_obstacle()
    if obstacle is None:
        text = f"native CPU kernels on MXFP4 bytes, {_instruction_set(machine)}: no GPU was found"
        return Finding("experts", "ok", text, None, {"path": "cpu", "on": "cpu"})
    return Finding(
        "experts",
        "warning",
        f"the plain torch reference, slow: no GPU was found and {obstacle}",
        "python -m k3tune_kernels.cpu.build",
        {"path": "reference", "on": "cpu"},
    )


def compiler_findings(gpus: list[Gpu]) -> Iterator[Finding]:
    """Compilers: of the CPU kernels, and of what Triton builds at run time."""
    try:
        compiler = build.find_compiler()[0]
    except build.BuildError as error:
        needed = bool(gpus) or library_obstacle() is not None
        yield Finding(
            "compiler",
            "failure" if gpus else "warning" if needed else "ok",
            str(error),
            "install g++ or clang++ (Debian: apt install g++)" if needed else None,
            {"compiler": None},
        )
    else:
        yield Finding("compiler", "ok", compiler, facts={"compiler": compiler})
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if gpus and not header.is_file():
        yield Finding(
            "compiler",
            "failure",
            f"{header} is missing: Triton compiles a launcher against it for every kernel",
            "install Python's headers (Debian: apt install python3-dev)",
            {"header": str(header)},
        )


def library_obstacle() -> str | None:
    """Why the library of CPU kernels cannot serve, as its file tells; None if it can."""
    try:
        content = build.LIBRARY.read_bytes()
    except OSError:
        return f"{build.LIBRARY.name} was not built"
    if build.source_digest().encode() not in content:
        return f"{build.LIBRARY.name} was built from other sources"
    return None


def _on_gpu(gpu: Gpu) -> str:
    how = (
        f"{gpu.target} takes MXFP4 operands natively, but training keeps BF16 activations, so the "
        "kernels decode weights to BF16 on the fly: the 4-bit memory win, not its arithmetic"
        if gpu.native_fp4
        else f"{gpu.target} has no MXFP4 arithmetic: the kernels decode weights to BF16 on the fly"
    )
    return f"Triton kernels on packed MXFP4; {how}"


def _instruction_set(machine: Machine) -> str:
    line = re.search(r"^flags\s*:(.*)$", machine.read("proc/cpuinfo") or "", re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return next(name for name, needed in _INSTRUCTION_SETS.items() if needed <= flags)
