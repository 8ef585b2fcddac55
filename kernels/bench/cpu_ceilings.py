"""The ceilings of an AVX512-BF16 CPU: memory read, and bf16 dot products from registers."""

import ctypes
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from k3tune_kernels.cpu import build

_READ_BYTES = 512 << 20
_DOT_ROUNDS = 2_000_000


@dataclass(frozen=True)
class CpuCeilings:
    """Medians, in one second, with torch's number of threads."""

    read_bytes: float
    dot_flops: float


def measure(rounds: int = 7) -> CpuCeilings:
    """Compile the two loops and run them in turns.

    Raises:
        BuildError: if there is no compiler.
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
    library.read_bytes_per_s.restype = library.dot_flops_per_s.restype = ctypes.c_double
    address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(_READ_BYTES)
    reads, dots = [], []
    for _ in range(rounds):
        reads.append(library.read_bytes_per_s(address, size, threads))
        dots.append(library.dot_flops_per_s(ctypes.c_int64(_DOT_ROUNDS), threads))
    return CpuCeilings(statistics.median(reads), statistics.median(dots))
