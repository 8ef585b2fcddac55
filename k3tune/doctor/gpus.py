"""The GPUs of this machine, as drivers and ``/sys`` tell; torch is not asked here."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from k3tune.doctor.finding import Finding
from k3tune.doctor.machine import Machine

_NVIDIA_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap,driver_version",
    "--format=csv,noheader,nounits",
)
_MIB = 1 << 20
# Targets that ``kernels/bench/compile_table.py`` compiles the kernels for.
_COMPILED = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
_NATIVE_FP4 = ("sm_100", "sm_103", "sm_120", "sm_121", "gfx950")


class Gpu(NamedTuple):
    """One GPU; ``target`` is what compilers call it, such as ``sm_90`` or ``gfx950``."""

    vendor: str
    name: str
    memory_bytes: int
    target: str

    @property
    def native_fp4(self) -> bool:
        """Whether its matrix units take MXFP4 operands."""
        return self.target in _NATIVE_FP4

    @property
    def has_kernels(self) -> bool:
        """Whether k3tune's Triton kernels run on it: bf16 matrix units are what it takes."""
        return self.vendor == "amd" or int(self.target.removeprefix("sm_")) >= 80


def find_gpus(machine: Machine) -> tuple[list[Gpu], list[Finding]]:
    """GPUs and what there is to say about them.

    A driver that does not answer is a failure; no GPU is a warning.
    """
    answer = machine.ask(_NVIDIA_QUERY)
    gpus, problem = _nvidia(answer.output or ""), answer.problem
    gpus += _amd(machine)
    findings = list(_describe(gpus))
    if problem:
        findings.append(
            Finding(
                "gpu",
                "failure",
                f"nvidia-smi is installed, but {problem}",
                "run nvidia-smi by hand; a driver that was updated or hangs needs a reboot",
            )
        )
    elif not gpus:
        findings.append(
            Finding(
                "gpu",
                "warning",
                "none found: k3-nano, its recipes and the tests run on the CPU, Kimi K3 itself "
                "does not",
                "for K3 run k3tune doctor on a GPU node; k3tune plan says how many it takes",
                {"gpus": 0},
            )
        )
    return gpus, findings


def _describe(gpus: list[Gpu]) -> Iterator[Finding]:
    for kind in dict.fromkeys(gpus):
        count = gpus.count(kind)
        size = f"{kind.memory_bytes / 1e9:.0f} GB each" if kind.memory_bytes else "shared memory"
        facts = {**kind._asdict(), "count": count, "native_fp4": kind.native_fp4}
        text = f"{count} x {kind.name}, {size}, {kind.target}"
        if not kind.has_kernels:
            yield Finding(
                "gpu",
                "warning",
                f"{text}: the kernels need sm_80 or newer, the slow reference runs instead",
                "use an Ampere or newer GPU",
                facts,
            )
        elif kind.target not in _COMPILED and not kind.native_fp4:
            yield Finding(
                "gpu",
                "warning",
                f"{text}: the kernels were never compiled for this target",
                "trust the self-test below, and report what it says",
                facts,
            )
        else:
            yield Finding("gpu", "ok", text, None, facts)


def _nvidia(output: str) -> list[Gpu]:
    gpus = []
    for line in output.splitlines():
        words = [word.strip() for word in line.split(",")]
        capability = re.fullmatch(r"(\d+)\.(\d)", words[2]) if len(words) == 4 else None
        if capability is None:
            continue
        # memory that is shared with the CPU is "[N/A]"
        memory = int(words[1]) * _MIB if words[1].isdigit() else 0
        gpus.append(Gpu("nvidia", words[0], memory, f"sm_{capability[1]}{capability[2]}"))
    return gpus


def _amd(machine: Machine) -> list[Gpu]:
    """GPUs of the kernel's compute driver; its CPU nodes have no target."""
    gpus = []
    for node in machine.paths("sys/class/kfd/kfd/topology/nodes/*"):
        version = machine.properties(node / "properties").get("gfx_target_version", 0)
        if not version:
            continue
        # 90402 is gfx942: two decimal digits a part, the last in hexadecimal
        target = f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
        banks = machine.paths(f"{node.relative_to(machine.root)}/mem_banks/*/properties")
        memory = sum(machine.properties(bank).get("size_in_bytes", 0) for bank in banks)
        gpus.append(Gpu("amd", machine.read(node / "name") or "AMD GPU", memory, target))
    return gpus
