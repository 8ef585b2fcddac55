"""The devices a plan is made for: memory, bandwidth, peak, links. Data with its sources."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from k3tune.errors import ConfigError

_GB = 1e9
_TERA = 1e12
# What a device may be given, in GB: beyond it bytes and seconds leave the range of floats.
_LEAST, _MOST = 1e-6, 1e9


@dataclass(frozen=True)
class Hardware:
    """One device and what joins it to others; rates are of one direction.

    Memory is the vendor's decimal figure. Drivers show some 6 % more than it on NVIDIA's cards;
    that difference is what a plan leaves to the driver, communicators and fragmentation.

    Attributes:
        key: as options name it.
        name: of the product.
        memory_bytes: of one device.
        bandwidth_bytes_per_s: of its memory.
        flops_per_s: dense BF16 peak, a multiply-add being two.
        link_bytes_per_s: to each other device of its fast domain together.
        network_bytes_per_s: beyond that domain.
        gpus_per_node: devices of a node, which share a trunk under ``trunk_shard: node``.
        link_ranks: devices of the fast domain.
        native_mxfp4: whether its matrix units take MXFP4; others decode it in the kernel.
        source: where the figures come from.
    """

    key: str
    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int
    link_ranks: int
    native_mxfp4: bool
    source: str

    @property
    def is_cpu(self) -> bool:
        """Whether the model runs on its plain CPU path."""
        return self.key == "cpu"

    def link(self, ranks: int) -> float:
        """Bytes a second and rank, one way, inside a group of so many ranks."""
        return self.link_bytes_per_s if ranks <= self.link_ranks else self.network_bytes_per_s


def known_hardware() -> tuple[str, ...]:
    """Names :func:`find_hardware` takes."""
    return tuple(_table())


def dense_peak(reported_name: str) -> float | None:
    """Dense BF16 peak in FLOP/s of the device that a driver calls so; None if it is not listed."""
    for entry in _table().values():
        if reported_name in entry["reported_names"]:
            return float(entry["bf16_tflops"] * _TERA)
    return None


def find_hardware(
    key: str, *, memory_gb: float | None = None, bandwidth_gb_per_s: float | None = None
) -> Hardware:
    """A device of the table, with its memory or bandwidth replaced if asked.

    Raises:
        ConfigError: if the table has no such device, or a figure is out of range.
    """
    table = _table()
    if key not in table:
        raise ConfigError(
            f"gpu is {key!r}, expected one of {', '.join(table)}: name the nearest one, and give "
            "its memory and bandwidth"
        )
    entry = table[key]
    device = Hardware(
        key=key,
        name=entry["name"],
        memory_bytes=round(entry["memory_gb"] * _GB),
        bandwidth_bytes_per_s=entry["bandwidth_gb_per_s"] * _GB,
        flops_per_s=entry["bf16_tflops"] * _TERA,
        link_bytes_per_s=entry["link_gb_per_s"] * _GB,
        network_bytes_per_s=entry["network_gb_per_s"] * _GB,
        gpus_per_node=entry["gpus_per_node"],
        link_ranks=entry["link_ranks"],
        native_mxfp4=entry["native_mxfp4"],
        source=entry["source"],
    )
    own: dict[str, Any] = {}
    for name, given, field in (
        ("gpu_memory_gb", memory_gb, "memory_bytes"),
        ("gpu_bandwidth_gb_per_s", bandwidth_gb_per_s, "bandwidth_bytes_per_s"),
    ):
        if given is None:
            continue
        # a comparison that is false for nan, too
        if not _LEAST <= given <= _MOST:
            raise ConfigError(
                f"{name} is {given}, expected a number of GB above 0, from {_LEAST:g} to {_MOST:g}"
            )
        own[field] = round(given * _GB)
    if own:
        own["name"] = f"{device.name} with "
        own["name"] += " and ".join(
            f"{given:g} {unit}"
            for given, unit in ((memory_gb, "GB"), (bandwidth_gb_per_s, "GB/s"))
            if given is not None
        )
    return replace(device, **own)


@cache
def _table() -> Mapping[str, Any]:
    file = resources.files("k3tune") / "assets" / "plan" / "hardware.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table
