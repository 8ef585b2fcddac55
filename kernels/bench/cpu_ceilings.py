"""The ceilings of a CPU: memory read, and its best arithmetic from registers."""

import ctypes
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from k3tune_kernels.cpu import build

_READ_BYTES = 512 << 20


@dataclass(frozen=True)
class CpuCeilings:
    """Medians, in one second, with torch's number of threads.

    Attributes:
        read_bytes: from memory.
        flops: multiplications and additions.
        arithmetic: what those are of, in words: bf16 tiles (AMX), or the best this CPU has.
    """

    read_bytes: float
    flops: float
    arithmetic: str

    def __str__(self) -> str:
        return (
            f"memory read {self.read_bytes / 1e9:.1f} GB/s, {self.arithmetic} "
            f"{self.flops / 1e9:.0f} GFLOP/s"
        )


def measure(rounds: int = 7) -> CpuCeilings:
    """Compile the two loops and run them in turns.

    Raises:
        BuildError: if there is no compiler, or the CPU lacks AVX2.
    """
    source = Path(__file__).with_name("cpu_ceilings.cpp")
    buffer = torch.ones(_READ_BYTES, dtype=torch.uint8)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "ceilings.so"
        flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
        command = [*build.find_compiler(), *flags, str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        library = ctypes.CDLL(str(made))
    library.arithmetic.restype = ctypes.c_char_p
    library.read_bytes_per_s.restype = library.flops_per_s.restype = ctypes.c_double
    if library.arithmetic() is None:
        raise build.BuildError("the ceilings are measured on CPUs with AVX2, this one has none")
    address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(_READ_BYTES)
    reads, flops = [], []
    for _ in range(rounds):
        reads.append(library.read_bytes_per_s(address, size, threads))
        flops.append(library.flops_per_s(threads))
    return CpuCeilings(
        statistics.median(reads), statistics.median(flops), library.arithmetic().decode()
    )
