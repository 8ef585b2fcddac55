"""The shared library of the CPU kernels: where it lies, what it exports, whether it can be used."""

import ctypes
from functools import cache
from typing import Any

import torch

from k3tune_kernels.cpu import build

REBUILD = "run python -m k3tune_kernels.cpu.build"

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of activations and LoRA factors, and their numbers in the C interface."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_STATUS_OUT_OF_MEMORY, _STATUS_NO_SUCH_ISA = 1, 2


class Weight(ctypes.Structure):
    """``K3Weight`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        ("packed", _POINTER),
        ("scale", _POINTER),
        ("packed_expert_stride", _INT),
        ("packed_row_stride", _INT),
        ("scale_expert_stride", _INT),
        ("scale_row_stride", _INT),
    )


class Factors(ctypes.Structure):
    """``K3Factors`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        ("A", _POINTER),
        ("B", _POINTER),
        ("scaling_E", _POINTER),
        ("dA", _POINTER),
        ("dB", _POINTER),
        ("scaling", ctypes.c_double),
        ("rank", _INT),
        ("A_dtype", _INT),
        ("B_dtype", _INT),
        ("A_shared", _INT),
        ("B_shared", _INT),
    )


class Moe(ctypes.Structure):
    """``K3Moe`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        ("tokens", _INT),
        ("active", _INT),
        ("experts", _INT),
        ("dim", _INT),
        ("hidden", _INT),
        ("x_dtype", _INT),
        ("threads", _INT),
        ("isa", _INT),
        ("hidden_rounding", _INT),
        ("beta", ctypes.c_double),
        ("linear_beta", ctypes.c_double),
        ("x", _POINTER),
        ("expert_ids", _POINTER),
        ("expert_weights", _POINTER),
        ("local_experts", _POINTER),
        ("narrow", _POINTER),
        ("out", _POINTER),
        ("d_out", _POINTER),
        ("dx", _POINTER),
        ("d_weights", _POINTER),
        ("weight", Weight * 3),
        ("lora", Factors * 3),
    )


class Mix(ctypes.Structure):
    """``K3Mix`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("tokens", "num_sources", "dim", "dtype", "threads", "isa")),
        ("eps", ctypes.c_double),
        *((name, _POINTER) for name in ("sources", "query", "out", "weights", "inverse_rms")),
        *((name, _POINTER) for name in ("grad", "d_sources", "d_query")),
    )


class RmsNorm(ctypes.Structure):
    """``K3RmsNorm`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("tokens", "dim", "dtype", "threads", "isa")),
        ("eps", ctypes.c_double),
        *((name, _POINTER) for name in ("x", "weight", "gate", "out")),
        *((name, _POINTER) for name in ("grad", "dx", "d_weight", "d_gate")),
    )


class ShortConvolution(ctypes.Structure):
    """``K3ShortConvolution`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "tokens", "channels", "dtype", "threads", "isa")),
        *((name, _POINTER) for name in ("x", "past", "taps", "reach", "out")),
        *((name, _POINTER) for name in ("grad", "dx", "d_past", "d_taps")),
    )


class KdaStep(ctypes.Structure):
    """``K3KdaStep`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "heads", "head_dim", "context", "threads", "isa")),
        *((name, ctypes.c_double) for name in ("gate_lower_bound", "eps", "unit_eps")),
        ("x", _POINTER * 3),
        *((name, _POINTER) for name in ("window", "taps", "decay_logit", "decay_bias")),
        *((name, _POINTER) for name in ("decay_rate", "beta_logit", "gate", "norm_weight")),
        *((name, _POINTER) for name in ("state", "out")),
    )


class KdaRule(ctypes.Structure):
    """``K3KdaRule`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("row_tokens", "documents", "heads", "head_dim")),
        *((name, _INT) for name in ("threads", "isa")),
        *((name, _POINTER) for name in ("bounds", "q", "k", "v", "log_decay", "beta", "begin")),
        *((name, _POINTER) for name in ("out", "error", "end", "d_out", "d_end")),
        *((name, _POINTER) for name in ("dq", "dk", "dv", "d_log_decay", "d_beta", "d_begin")),
    )


class LatentAttention(ctypes.Structure):
    """``K3LatentAttention`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "heads", "dim", "value_dim", "threads", "isa")),
        ("scale", ctypes.c_double),
        *((name, _POINTER) for name in ("query", "latents")),
        *((name, _INT) for name in ("row_stride", "place_stride")),
        *((name, _POINTER) for name in ("last_place", "out")),
    )


class SituGlu(ctypes.Structure):
    """``K3SituGlu`` of csrc/k3tune_cpu.h."""

    _fields_ = (
        *((name, _INT) for name in ("values", "threads", "isa")),
        *((name, ctypes.c_double) for name in ("beta", "linear_beta")),
        *((name, _POINTER) for name in ("gate", "up", "grad", "out", "d_gate", "d_up")),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "k3_moe_forward": (_INT, [_POINTER]),
    "k3_moe_backward": (_INT, [_POINTER]),
    "k3_mix": (_INT, [_POINTER]),
    "k3_mix_backward": (_INT, [_POINTER]),
    "k3_rms_norm": (_INT, [_POINTER]),
    "k3_rms_norm_backward": (_INT, [_POINTER]),
    "k3_short_convolution": (_INT, [_POINTER]),
    "k3_short_convolution_backward": (_INT, [_POINTER]),
    "k3_kda_step": (_INT, [_POINTER]),
    "k3_kda_rule": (_INT, [_POINTER]),
    "k3_latent_attention": (_INT, [_POINTER]),
    "k3_situ_glu": (_INT, [_POINTER]),
    "k3_decode": (None, [_POINTER, _POINTER, _INT, _INT, _POINTER]),
    "k3_project": (_INT, [_POINTER, _INT, _INT, _POINTER, *[_INT] * 5, _POINTER]),
    "k3_situ": (
        None,
        [*[_POINTER] * 3, _INT, ctypes.c_double, ctypes.c_double, _INT, *[_POINTER] * 3],
    ),
    "k3_isa_name": (ctypes.c_char_p, [_INT]),
    "k3_isa_runs_here": (_INT, [_INT]),
}


@cache
def obstacle() -> str | None:
    """Why the library cannot be used, or ``None``; the answer stays that of the first call."""
    return _open()[1]


@cache
def load() -> ctypes.CDLL:
    """The library.

    Raises:
        ValueError: if it cannot be used; see :func:`obstacle`.
    """
    library, reason = _open()
    if library is None:
        raise ValueError(f"the CPU kernels cannot be used: {reason}")
    return library


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    if not build.LIBRARY.exists():
        return None, f"{build.LIBRARY.name} was not built: {REBUILD} to see why, or to build it"
    # Importing torch has put its OpenMP runtime where the library looks for one.
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return None, f"{build.LIBRARY.name} cannot be loaded ({error}): {REBUILD}"
    digest = library.k3_source_digest
    digest.restype = ctypes.c_char_p
    # Another interface than the one declared here would be read as memory it is not.
    if digest().decode() != build.source_digest():
        return None, f"{build.LIBRARY.name} was built from other sources: {REBUILD}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, None


def isas() -> list[str]:
    """Names of the instruction sets this CPU can run, the one that is chosen first."""
    library, names = load(), []
    index = 0
    while (name := library.k3_isa_name(index)) is not None:
        if library.k3_isa_runs_here(index):
            names.append(name.decode())
        index += 1
    return names


def isa_index(name: str | None) -> int:
    """Number of an instruction set in the C interface; ``None`` is the best one.

    Raises:
        ValueError: if this CPU cannot run it, or there is no such one.
    """
    if name is None:
        return -1
    if name not in isas():
        raise ValueError(f"expected an instruction set of {isas()}, found {name!r}")
    library = load()
    return next(i for i in range(len(name) + 8) if library.k3_isa_name(i) == name.encode())


def check(status: int) -> None:
    """Raise what a call's status says."""
    if status == _STATUS_OUT_OF_MEMORY:
        raise MemoryError("the CPU kernels could not get the memory of their buffers")
    assert status != _STATUS_NO_SUCH_ISA, f"{status=}: no instruction set runs here"
    assert status == 0, f"{status=}"
