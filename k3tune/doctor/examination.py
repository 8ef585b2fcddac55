"""All questions of the doctor, in the order a reader wants the answers."""

import warnings
from collections.abc import Iterator
from pathlib import Path

from k3tune.doctor.disk import disk_findings
from k3tune.doctor.experts import compiler_findings, path_finding
from k3tune.doctor.finding import Finding
from k3tune.doctor.gpus import find_gpus
from k3tune.doctor.interconnect import interconnect_findings
from k3tune.doctor.machine import Machine
from k3tune.doctor.traps import trap_findings
from k3tune.doctor.versions import package_findings, python_finding

_DISK_BUDGET_S = {True: 0.3, False: 2.0}


def examine(
    base: Path | None = None, *, quick: bool = False, machine: Machine | None = None
) -> Iterator[Finding]:
    """Look at this machine.

    Args:
        base: checkpoint folder the disk is held against; None takes the current folder and Kimi
            K3's size.
        quick: neither import torch nor test its arithmetic.
        machine: a picture of a machine, for tests.

    Raises:
        K3TuneError: if ``base`` is no checkpoint folder.
    """
    machine = machine or Machine()
    # a wrong name is an error before any waiting
    disk = list(disk_findings(base or Path.cwd(), base is not None, _DISK_BUDGET_S[quick]))
    gpus, gpu_findings = find_gpus(machine)
    yield python_finding()
    yield from package_findings()
    yield from trap_findings(bool(gpus))
    yield from compiler_findings(gpus)
    yield from gpu_findings
    yield from interconnect_findings(machine, gpus)
    path = path_finding(machine, gpus)
    yield path
    yield from disk
    if quick:
        yield Finding("self-test", "ok", "left out by --quick, as is what torch sees")
        return
    try:
        # importing torch takes seconds
        from k3tune.doctor.self_test import self_test, torch_finding
    # a library that torch loads may be missing, too
    except (ImportError, OSError) as error:
        yield Finding(
            "torch",
            "failure",
            f"it cannot be imported: {error}",
            "install torch again, in the version of the range above",
        )
        return
    yield torch_finding(len(gpus))
    with warnings.catch_warnings():
        # that the CPU kernels cannot be used is a finding already
        warnings.simplefilter("ignore", RuntimeWarning)
        yield from self_test(str(path.facts["path"]))
