"""What the machine can do at best, measured: the ceilings that results are held against."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import interleaved

# Bytes of the copied buffer and side of the squared matmul, by device type.
_SIZES = {"cuda": (2 * 1024**3, 8192), "cpu": (256 * 1024**2, 1024)}


@dataclass(frozen=True)
class Ceilings:
    """Highest rates seen, in one second."""

    read_write_bytes: float
    matmul_flops: float


def machine_name(device: torch.device) -> str:
    """The card, or the processor with the number of threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {torch.get_num_threads()} threads"


def measure(device: torch.device, dtype: torch.dtype, rounds: int) -> Ceilings:
    """Copy a buffer far larger than the caches, and multiply two square matrices.

    Args:
        device: where.
        dtype: of the matrices.
        rounds: repetitions; the median counts.
    """
    copied_bytes, side = _SIZES[device.type]
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    calls = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(a, b, out=product),
    }
    timings = interleaved(calls, device, rounds)
    return Ceilings(
        read_write_bytes=2 * copied_bytes / timings["copy"].median_s,
        matmul_flops=2 * side**3 / timings["matmul"].median_s,
    )
