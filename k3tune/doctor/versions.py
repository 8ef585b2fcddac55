"""Installed packages against what k3tune asks for, and against what it was tested with."""

import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from k3tune.doctor.finding import Finding

# The newest versions the tests ran with; newer ones may well work.
NEWEST_TESTED = {
    "torch": "2.13",
    "triton": "3.9",
    "transformers": "5.24",
    "peft": "0.21",
    "trl": "1.16",
    "deepspeed": "0.19",
    "accelerate": "1.15",
    "datasets": "5.2",
    "safetensors": "0.8",
    "tiktoken": "0.14",
}
_PYTHON_NEEDED, _PYTHON_TESTED = (3, 11), "3.11"

Lookup = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """Version of an installed package; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements(of: str) -> dict[str, Requirement]:
    """What an installed package asks for on this machine without extras, by name.

    Raises:
        PackageNotFoundError: if ``of`` is not installed.
    """
    found = {}
    for line in metadata.requires(of) or ():
        try:
            requirement = Requirement(line)
        # other people's metadata may be older than the rules
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name.lower()] = requirement
    return found


def python_finding(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Python itself."""
    text = ".".join(map(str, version))
    facts = {"version": text, "tested": _PYTHON_TESTED}
    if version < _PYTHON_NEEDED:
        needed = ".".join(map(str, _PYTHON_NEEDED))
        return Finding(
            "python",
            "failure",
            f"{text} is older than {needed}",
            f"make an environment with Python {needed} or newer",
            facts,
        )
    return Finding("python", "ok", f"{text} (tested with {_PYTHON_TESTED})", facts=facts)


def package_findings(lookup: Lookup = installed) -> Iterator[Finding]:
    """The packages k3tune needs: one finding for all that fit, one for each that does not.

    Args:
        lookup: gives a package's installed version, or None.
    """
    try:
        wanted = requirements("k3tune")
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            "warning",
            "k3tune runs from a folder and is not installed: its ranges of versions are not known",
            "pip install -e . in the checkout",
        )
        return
    versions = {name: lookup(name) for name in wanted}
    judged = {name: _judge(wanted[name], versions[name]) for name in wanted}
    fine = {name: version for name, version in versions.items() if judged[name] is None}
    listed = ", ".join(f"{name} {version}" for name, version in fine.items())
    yield Finding("packages", "ok", f"in their ranges: {listed or 'none'}", facts=fine)
    yield from filter(None, judged.values())


def _judge(requirement: Requirement, version: str | None) -> Finding | None:
    name, tested = requirement.name, NEWEST_TESTED.get(requirement.name)
    facts = {"version": version, "range": str(requirement.specifier), "newest_tested": tested}
    pin = f'pip install "{name}{requirement.specifier}"'
    if version is None:
        return Finding(name, "failure", f"it is not installed, {requirement} is needed", pin, facts)
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{version} is outside the range {requirement.specifier}"
        return Finding(name, "failure", text, pin, facts)
    if tested is None or Version(version).release[:2] <= Version(tested).release:
        return None
    text = f"{version} is newer than {tested}, the newest tested"
    return Finding(
        name, "warning", text, f'if something fails: pip install "{name}=={tested}.*"', facts
    )
