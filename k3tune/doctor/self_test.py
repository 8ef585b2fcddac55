"""Five seconds of arithmetic: does this machine's path give what the reference gives?

Shape letters: ``N`` tokens, ``D`` latent, ``F`` expert hidden, ``E`` experts, ``A`` active experts,
``R`` LoRA rank.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from k3tune.doctor.finding import Finding
from k3tune_kernels import dispatch
from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora
from k3tune_kernels.mxfp4 import GROUP_SIZE, decode

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_N, _D, _F, _E, _A, _R = 64, 128, 96, 8, 4, 8
_SITU = Situ(4.0, 25.0)
# Relative L2 of output and every gradient against the reference in fp64. The kernels' own tests
# hold them to 1e-6 and 6e-3; the rest is for sizes and devices they were not measured on.
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def torch_finding(num_gpus: int) -> Finding:
    """Whether torch can reach what the drivers show.

    Args:
        num_gpus: GPUs that the drivers show.
    """
    built_for = torch.version.hip or torch.version.cuda
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = {"version": torch.__version__, "built_for": built_for, "gpus": seen}
    build = f"{torch.__version__}, built for {built_for or 'CPUs only'}"
    if num_gpus and not built_for:
        return Finding(
            "torch",
            "failure",
            f"{build}, but there are {num_gpus} GPUs",
            "install the CUDA or ROCm wheel of the same version",
            facts,
        )
    if num_gpus and not seen:
        return Finding(
            "torch",
            "failure",
            f"{build}, reaches none of the {num_gpus} GPUs: the driver is too old for it, or "
            "CUDA_VISIBLE_DEVICES hides them",
            "compare with the CUDA version nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES",
            facts,
        )
    return Finding("torch", "ok", f"{build}, sees {seen} GPUs", None, facts)


def self_test(predicted: str) -> Iterator[Finding]:
    """Decode MXFP4 and run ``moe_lora`` forward and backward, against independent values.

    Args:
        predicted: the path that :func:`k3tune.doctor.experts.path_finding` expects.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield _decode(device)
    # a GPU trains in bf16, and every kernel is compiled at its first use
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16,):
        yield _moe_lora(device, dtype)
    chosen = dispatch.explain("moe_lora")
    assert isinstance(chosen, dispatch.Choice), "moe_lora just ran"
    if chosen.backend != predicted:
        yield Finding(
            "experts",
            "warning",
            f"{chosen.backend} ran where {predicted} was expected: {chosen.reason}",
            "name the backend with --kernels to hear why it cannot run",
            {"path": chosen.backend, "reason": chosen.reason},
        )


def _decode(device: torch.device) -> Finding:
    """All 256 bytes under every scale, against the format's definition."""
    codes = torch.arange(256)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=1).flatten()
    signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
    values = signed[nibbles].view(1, -1)
    scales = torch.arange(255)
    expected = values * torch.exp2(scales.double() - 127).view(-1, 1)
    packed = codes.to(torch.uint8).expand(255, -1).contiguous()
    groups = 2 * 256 // GROUP_SIZE
    scale = scales.to(torch.uint8).view(-1, 1).expand(-1, groups).contiguous()
    found = decode(packed.to(device), scale.to(device), torch.float64).cpu()
    wrong = int((found != expected).sum())
    facts = {"values": expected.numel(), "wrong": wrong, "device": device.type}
    if wrong:
        return _broken(f"MXFP4 decode: {wrong} of {expected.numel()} values are wrong", facts)
    return Finding("self-test", "ok", f"MXFP4 decode is exact on {device.type}", None, facts)


def _moe_lora(device: torch.device, dtype: torch.dtype) -> Finding:
    name, bound = str(dtype).removeprefix("torch."), _BOUNDS[dtype]
    expected = _forward_backward(torch.device("cpu"), dtype, torch.float64, "reference")
    begun = time.perf_counter()
    try:
        found = _forward_backward(device, dtype, dtype, "auto")
    # whatever a compiler or a driver throws is what this test is for
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), "")[:200]
        text = f"moe_lora in {name} fails: {type(error).__name__}: {said}"
        return _broken(text, {"dtype": name, "device": device.type})
    took_s = time.perf_counter() - begun
    chosen = dispatch.explain("moe_lora")
    assert isinstance(chosen, dispatch.Choice), "moe_lora just ran"
    errors = {
        key: _relative(found[key].cpu().double(), value.double()) for key, value in expected.items()
    }
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else 1e9)
    facts = {
        "dtype": name,
        "backend": chosen.backend,
        "reason": chosen.reason,
        "relative_l2": errors,
        "bound": bound,
        "took_s": round(took_s, 3),
    }
    ran = f"moe_lora forward and backward in {name} on {chosen.backend} ({chosen.reason})"
    if not errors[worst] <= bound:
        return _broken(f"{ran}: {worst} is off by {errors[worst]:.1e}, bound {bound:.0e}", facts)
    text = f"{ran}: within {errors[worst]:.1e} of the reference, bound {bound:.0e}"
    return Finding("self-test", "ok", text, None, facts)


def _broken(text: str, facts: dict[str, object]) -> Finding:
    next_step = "train with --kernels reference (slow), and report this with k3tune doctor --json"
    return Finding("self-test", "failure", text, next_step, facts)


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _forward_backward(
    device: torch.device, rounding: torch.dtype, dtype: torch.dtype, backend: str
) -> dict[str, Tensor]:
    """Output and gradients of one seeded problem, whose values are exact in ``rounding``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        values = (size * torch.randn(shape, generator=generator)).to(rounding)
        return values.to(device, dtype).requires_grad_()

    def weight(outputs: int, inputs: int) -> PackedWeight:
        packed = torch.randint(256, (_E, outputs, inputs // 2), generator=generator)
        groups = inputs // GROUP_SIZE
        scale = torch.randint(118, 123, (_E, outputs, groups), generator=generator)
        return PackedWeight(packed.to(device, torch.uint8), scale.to(device, torch.uint8))

    def factors(outputs: int, inputs: int) -> LoraFactors:
        return LoraFactors(
            draw(_E, _R, inputs, size=0.1), draw(_E, outputs, _R, size=0.1), scaling=2.0
        )

    x_ND, dy_ND = draw(_N, _D), draw(_N, _D)
    ids_NA = torch.rand(_N, _E, generator=generator).argsort(dim=1)[:, :_A].to(device)
    weights_NA = draw(_N, _A)
    gate, up, down = weight(_F, _D), weight(_F, _D), weight(_D, _F)
    pairs = (factors(_F, _D), factors(_F, _D), factors(_D, _F))
    inputs = {"dx": x_ND, "dweights": weights_NA}
    for projection, pair in zip(("gate", "up", "down"), pairs, strict=True):
        inputs |= {f"dA {projection}": pair.A, f"dB {projection}": pair.B}
    out_ND = moe_lora(
        x_ND, ids_NA, weights_NA, gate, up, down, MoELora(*pairs), situ=_SITU, backend=backend
    )
    gradients = torch.autograd.grad(out_ND, list(inputs.values()), dy_ND.detach())
    return {"output": out_ND.detach(), **dict(zip(inputs, gradients, strict=True))}
