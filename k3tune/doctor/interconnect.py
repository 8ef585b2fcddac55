"""What joins the GPUs of a node, and nodes; and what that means for experts spread over nodes."""

import re
from collections.abc import Iterator

from k3tune.doctor.finding import Finding
from k3tune.doctor.gpus import Gpu
from k3tune.doctor.machine import Machine

# Kimi K3 sends a token's latent to each of its experts and takes as much back, in BF16, in every
# MoE layer, and the same once more in the backward pass.
_ACTIVE, _LATENT, _MOE_LAYERS = 16, 3584, 92
TOKEN_BYTES = _ACTIVE * _LATENT * 2 * 2 * _MOE_LAYERS * 2
_XGMI = 11
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
# Below this a step waits for the network most of the time.
_SLOW_GBIT_PER_S = 100.0


def interconnect_findings(machine: Machine, gpus: list[Gpu]) -> Iterator[Finding]:
    """Links between GPUs of this machine, if it has several, and the network to others.

    Args:
        machine: where to look.
        gpus: what :func:`k3tune.doctor.gpus.find_gpus` found.
    """
    if len(gpus) > 1:
        yield _inside(machine, gpus)
    yield _between(machine, gpus)


def _inside(machine: Machine, gpus: list[Gpu]) -> Finding:
    if gpus[0].vendor == "amd":
        links = machine.paths("sys/class/kfd/kfd/topology/nodes/*/io_links/*/properties")
        xgmi = sum(machine.properties(link).get("type") == _XGMI for link in links)
        name, joined = "xGMI", xgmi >= len(gpus) * (len(gpus) - 1)
    else:
        kinds = _nvidia_links(machine.ask(_TOPOLOGY).output or "")
        name, joined = "NVLink", bool(kinds) and all(kind.startswith("NV") for kind in kinds)
    facts = {"gpus": len(gpus), "links": name if joined else None}
    if joined:
        text = f"{name} joins all {len(gpus)} GPUs: experts may be spread over this node"
        return Finding("links", "ok", text, None, facts)
    return Finding(
        "links",
        "warning",
        f"{name} does not join all {len(gpus)} GPUs: dispatch goes over PCIe, which a step waits "
        "for",
        "keep expert_parallel_size low here, or use a node with NVLink or xGMI",
        facts,
    )


def _nvidia_links(matrix: str) -> list[str]:
    """Link kinds between different GPUs out of the topology matrix, such as ``NV18`` or ``PHB``."""
    # the header may be underlined by escape codes
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    rows = [words for words in lines if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if not re.fullmatch(r"GPU\d+", words[1])]
    kinds = [kind for words in rows for kind in words[1 : len(rows) + 1]]
    return [kind for kind in kinds if kind != "X"]


def _between(machine: Machine, gpus: list[Gpu]) -> Finding:
    ports = list(_rdma_ports(machine))
    rate = sum(gbit for _, gbit in ports)
    if not ports:
        return _without_rdma(machine, gpus)
    kinds = ", ".join(f"{name} {gbit:g} Gb/s" for name, gbit in ports)
    share = rate / max(1, len(gpus))
    facts = {"ports": dict(ports), "gbit_per_s": rate, "seconds_per_1000_tokens": _seconds(share)}
    text = f"RDMA over {kinds}"
    if gpus:
        text += (
            f": with experts on several nodes, 1,000 tokens of a GPU take {_seconds(share):.2g} s "
            "on the wire a step"
        )
    if share < _SLOW_GBIT_PER_S and gpus:
        return Finding(
            "network",
            "warning",
            f"{text}, at {share:g} Gb/s a GPU",
            "keep each expert-parallel group inside a node",
            facts,
        )
    if gpus and gpus[0].vendor == "nvidia" and not machine.paths("sys/module/nvidia_peermem"):
        return Finding(
            "network",
            "warning",
            f"{text}; nvidia_peermem is not loaded, so transfers may pass through the CPU's memory",
            "modprobe nvidia_peermem, unless NCCL_DEBUG=INFO shows DMA-BUF in use",
            facts,
        )
    return Finding("network", "ok", text, None, facts)


def _without_rdma(machine: Machine, gpus: list[Gpu]) -> Finding:
    rate = _ethernet_gbit(machine)
    facts: dict[str, object] = {"ports": {}, "ethernet_gbit_per_s": rate}
    if not gpus:
        return Finding(
            "network", "ok", "no RDMA, which one machine without GPUs needs not", None, facts
        )
    text = "no RDMA port is up: experts cannot usefully be spread over nodes"
    if rate:
        took = _seconds(rate / len(gpus))
        text += f" (1,000 tokens of a GPU would take {took:.2g} s on {rate:g} Gb/s Ethernet a step)"
    return Finding(
        "network",
        "warning",
        text,
        "train on one node with the experts inside it, or bring InfiniBand or RoCE up",
        facts,
    )


def _seconds(gbit_per_s: float) -> float:
    return 1000 * TOKEN_BYTES * 8 / (gbit_per_s * 1e9)


def _rdma_ports(machine: Machine) -> Iterator[tuple[str, float]]:
    """Active ports, InfiniBand or RoCE, with their rates in Gb/s."""
    for port in machine.paths("sys/class/infiniband/*/ports/*"):
        state = machine.read(port / "state") or ""
        rate = re.match(r"([\d.]+) Gb/sec", machine.read(port / "rate") or "")
        if "ACTIVE" in state and rate:
            layer = machine.read(port / "link_layer")
            kind = "RoCE" if layer == "Ethernet" else "InfiniBand"
            yield f"{kind} {port.parts[-3]}:{port.name}", float(rate[1])


def _ethernet_gbit(machine: Machine) -> float | None:
    """Rate of the fastest network interface that is up, where the driver tells one."""
    rates = []
    for interface in machine.paths("sys/class/net/*"):
        speed = machine.read(interface / "speed") or ""
        if machine.read(interface / "operstate") == "up" and speed.isdigit():
            rates.append(int(speed) / 1000)
    return max(rates, default=None)
