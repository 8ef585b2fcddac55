"""Combinations of packages that install well and fail later."""

import os
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.version import Version

from k3tune.doctor.finding import Finding
from k3tune.doctor.versions import Lookup, installed, requirements

# transformers asks for this release of ``kernels``, and takes an older one for a broken one.
_KERNELS_NEEDED = "0.18.2"


def trap_findings(
    gpu: bool, lookup: Lookup = installed, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The known traps, sprung or not.

    Args:
        gpu: whether this machine has a GPU.
        lookup: gives a package's installed version, or None.
        environment: variables of this process.
    """
    yield _fla(gpu, lookup)
    yield _triton_pin(lookup)
    yield _kernels(lookup)
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield Finding(
            "triton",
            "warning",
            "TRITON_INTERPRET is set: Triton kernels run in its interpreter, thousands of times "
            "slower, and never on a GPU",
            "unset TRITON_INTERPRET",
        )


def _fla(gpu: bool, lookup: Lookup) -> Finding:
    version = lookup("fla-core") or lookup("flash-linear-attention")
    facts = {"version": version, "gpu": gpu}
    if version and not gpu:
        return Finding(
            "fla",
            "failure",
            f"fla-core {version} is installed on a machine without a GPU: transformers picks its "
            "Triton kernels at import, which fail at run time",
            "pip uninstall fla-core flash-linear-attention",
            facts,
        )
    if gpu and not version:
        return Finding(
            "fla",
            "warning",
            "fla-core is not installed: the KDA layers run in plain torch, which is slower",
            'pip install "k3tune[gpu]"',
            facts,
        )
    return Finding(
        "fla", "ok", f"fla-core {version}" if gpu else "absent, as it must be", None, facts
    )


def _triton_pin(lookup: Lookup) -> Finding:
    """torch's CUDA wheels pin one triton; the CPU wheel pins none."""
    version, torch = lookup("triton"), lookup("torch")
    try:
        pin = requirements("torch").get("triton")
    except metadata.PackageNotFoundError:
        pin = None
    facts = {"triton": version, "torch": torch, "pin": pin and str(pin.specifier)}
    if pin is None:
        return Finding("triton", "ok", f"{version}; torch {torch} pins none", facts=facts)
    if version is None or not pin.specifier.contains(version, prereleases=True):
        return Finding(
            "triton",
            "failure",
            f"{version} is installed, torch {torch} works with triton{pin.specifier} only",
            f'pip install "triton{pin.specifier}"',
            facts,
        )
    return Finding("triton", "ok", f"{version}, as torch {torch} pins it", facts=facts)


def _kernels(lookup: Lookup) -> Finding:
    version = lookup("kernels")
    facts = {"version": version, "needed": _KERNELS_NEEDED}
    if version and Version(version) < Version(_KERNELS_NEEDED):
        return Finding(
            "kernels",
            "warning",
            f"the package kernels {version} is older than the {_KERNELS_NEEDED} that transformers "
            "asks for, and k3tune needs none",
            "pip uninstall kernels",
            facts,
        )
    return Finding("kernels", "ok", version or "absent, and not needed", facts=facts)
