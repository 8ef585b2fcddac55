"""Which implementation of an op runs, decided in one place and queryable.

An op calls :func:`choose` with its tensors and acts on the answer. The choice depends on the device
and dtype of the tensors and on the machine alone, never on timing: equal inputs take equal paths in
every process.
"""

import importlib.util
import os
import warnings
from functools import cache
from typing import NamedTuple

import torch

BACKENDS = ("auto", "triton", "cpu", "reference")

# Ops with Triton kernels, and the dtypes (of the first tensor an op passes) those kernels take.
TRITON_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "moe_lora": (torch.bfloat16, torch.float32),
    "situ_glu": (torch.bfloat16, torch.float32),
    "attention_residual": (torch.bfloat16, torch.float32),
    "linear_cross_entropy": (torch.bfloat16, torch.float32),
}

# Ops with native CPU kernels, likewise.
CPU_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "moe_lora": (torch.bfloat16, torch.float32),
    "situ_glu": (torch.float32,),
    "attention_residual": (torch.bfloat16, torch.float32),
    "rms_norm": (torch.bfloat16, torch.float32),
    "gated_rms_norm": (torch.float32,),
    "short_convolution": (torch.bfloat16, torch.float32),
    "kda_step": (torch.float32,),
    "kda_rule": (torch.float32,),
    "latent_attention": (torch.float32,),
}

# Of these some calls only: what their kernels do not take is the reference's, and no error under
# ``cpu`` either.
_CPU_WHERE_POSSIBLE = (
    "situ_glu",
    "attention_residual",
    "rms_norm",
    "gated_rms_norm",
    "short_convolution",
    "kda_step",
    "kda_rule",
    "latent_attention",
)

# Others may have no values at all, as when a compiler or a planner traces shapes.
_TENSORS_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)

# bf16 tensor-core instructions begin here.
_LOWEST_CUDA_CAPABILITY = (8, 0)


class Choice(NamedTuple):
    """The backend an op runs on, and the reason in words."""

    backend: str
    reason: str


_last_choice: dict[str, Choice] = {}


def choose(
    op: str,
    backend: str,
    *tensors: torch.Tensor,
    limit: str | None = None,
    cpu_limit: str | None = None,
) -> str:
    """Decide the backend of one call.

    Args:
        op: name of the op, as in :data:`TRITON_DTYPES`.
        backend: ``"auto"`` takes Triton where it can run, else the native CPU kernels, else the
            reference; other names insist. For an op without native CPU kernels ``"cpu"`` means the
            reference, which is what it has on a CPU.
        *tensors: what the op computes on; the dtype of the first decides, the device of all.
        limit: what this call asks for beyond the op's Triton kernel, in words; ``None`` if nothing.
        cpu_limit: likewise beyond its native CPU kernel.

    Returns:
        ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        ValueError: for an unknown name, or for one that cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: expected backend to be one of {BACKENDS}, found {backend!r}")
    choice = _CHOICES[backend](op, tensors, limit, cpu_limit)
    _last_choice[op] = choice
    return choice.backend


def explain(op: str | None = None) -> Choice | dict[str, Choice] | None:
    """What the last call of an op ran on, and why.

    Args:
        op: name of the op; ``None`` asks for all of them.

    Returns:
        The last :class:`Choice` of ``op`` (``None`` if it was not called yet), or a dict of all.
    """
    return dict(_last_choice) if op is None else _last_choice.get(op)


def _choose_reference(
    op: str, tensors: tuple[torch.Tensor, ...], limit: str | None, cpu_limit: str | None
) -> Choice:
    return Choice("reference", "asked for")


def _choose_triton(
    op: str, tensors: tuple[torch.Tensor, ...], limit: str | None, cpu_limit: str | None
) -> Choice:
    if obstacle := _obstacle_to_triton(op, tensors) or limit:
        raise ValueError(
            f"{op}: backend 'triton' was asked for, but {obstacle}; use 'auto' or 'reference'"
        )
    return Choice("triton", "asked for")


def _choose_cpu(
    op: str, tensors: tuple[torch.Tensor, ...], limit: str | None, cpu_limit: str | None
) -> Choice:
    if op not in CPU_DTYPES:
        return Choice("reference", "the CPU path of this op")
    if obstacle := _obstacle_to_cpu(op, tensors) or cpu_limit:
        if op in _CPU_WHERE_POSSIBLE:
            return Choice("reference", obstacle)
        raise ValueError(
            f"{op}: backend 'cpu' was asked for, but {obstacle}; use 'auto' or 'reference'"
        )
    return Choice("cpu", "asked for")


def _choose_auto(
    op: str, tensors: tuple[torch.Tensor, ...], limit: str | None, cpu_limit: str | None
) -> Choice:
    obstacle = _obstacle_to_triton(op, tensors) or limit
    obstacle = obstacle or _obstacle_to_choosing_interpreter(tensors)
    if obstacle is None:
        return Choice("triton", "can run here")
    if op not in CPU_DTYPES or tensors[0].device.type != "cpu":
        return Choice("reference", obstacle)
    if obstacle := _obstacle_to_cpu(op, tensors) or cpu_limit:
        return Choice("reference", obstacle)
    return Choice("cpu", "can run here")


_CHOICES = {
    "auto": _choose_auto,
    "triton": _choose_triton,
    "cpu": _choose_cpu,
    "reference": _choose_reference,
}


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _obstacle_to_triton(op: str, tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why Triton cannot run this call, or ``None``."""
    assert tensors, f"{op}: choose() needs at least one tensor"
    if op not in TRITON_DTYPES:
        return "this op has no Triton kernel"
    if not _triton_installed():
        return "triton is not installed"
    if tensors[0].dtype not in TRITON_DTYPES[op]:
        served = ", ".join(str(dtype) for dtype in TRITON_DTYPES[op])
        return f"its Triton kernel takes {served}, found {tensors[0].dtype}"
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        return f"the tensors lie on {len(devices)} devices: {sorted(map(str, devices))}"
    device = tensors[0].device
    if device.type == "cpu":
        return (
            None if interpreting() else "the tensors are on the CPU and TRITON_INTERPRET is unset"
        )
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if interpreting():
        return "TRITON_INTERPRET=1 runs CPU tensors only"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _LOWEST_CUDA_CAPABILITY:
        return f"it needs compute capability {_LOWEST_CUDA_CAPABILITY}, {device} has {capability}"
    return None


def _obstacle_to_choosing_interpreter(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Triton's interpreter is wrong in bf16 as shipped, so ``auto`` must not land on it."""
    if tensors[0].device.type == "cpu" and tensors[0].dtype is not torch.float32:
        return "Triton's interpreter computes bf16 wrongly; only an explicit 'triton' takes it"
    return None


def _obstacle_to_cpu(op: str, tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why the native CPU kernels of this op cannot run this call, or ``None``."""
    if tensors[0].dtype not in CPU_DTYPES[op]:
        served = ", ".join(str(dtype) for dtype in CPU_DTYPES[op])
        return f"its CPU kernel takes {served}, found {tensors[0].dtype}"
    # asked at every call of a decoding step: no strings where there is nothing to say
    for tensor in tensors:
        if type(tensor) not in _TENSORS_WITH_MEMORY:
            return f"one is a {type(tensor).__name__}, whose memory it cannot read"
        if not tensor.is_cpu:
            return f"the tensors are on {', '.join(sorted({str(t.device) for t in tensors}))}"
    # Opening the library belongs to the first call that needs it, not to the import.
    from k3tune_kernels.cpu import library

    obstacle = library.obstacle()
    if obstacle is not None:
        _warn_once(f"the CPU kernels cannot be used and the slower reference runs: {obstacle}")
    return obstacle


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
