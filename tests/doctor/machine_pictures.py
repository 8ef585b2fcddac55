"""Pictures of machines: what their drivers print and what their ``/sys`` holds."""

from pathlib import Path

from k3tune.doctor.machine import Answer, Machine

H200 = "NVIDIA H200, 143771, 9.0, 580.95.05\n"
B200 = "NVIDIA B200, 183359, 10.0, 580.95.05\n"
V100 = "Tesla V100-SXM2-32GB, 32768, 7.0, 535.183.01\n"
GB10 = "NVIDIA GB10, [N/A], 12.1, 580.95.05\n"


def topology(count: int, link: str) -> str:
    """What ``nvidia-smi topo -m`` prints for GPUs joined by one kind of link, and a card."""
    names = [f"GPU{number}" for number in range(count)]
    header = "\t" + "\t".join(["\x1b[4m" + names[0], *names[1:], "NIC0", "CPU Affinity\x1b[0m"])
    rows = []
    for row in range(count):
        links = [" X " if row == column else link for column in range(count)]
        rows.append("\t".join([names[row], *links, "PIX", "0-47"]))
    rows.append("\t".join(["NIC0", *["PIX"] * count, " X "]))
    return "\n".join([header, *rows, "", "Legend:", "  X    = Self", "  NV#  = NVLink"])


def machine(root: Path, *, smi: Answer | str | None = None, topo: str | None = None) -> Machine:
    """A machine with its files under ``root``, and with what ``nvidia-smi`` answers."""

    def ask(command):
        assert command[0] == "nvidia-smi"
        answer = topo if "topo" in command else smi
        return answer if isinstance(answer, Answer) else Answer(answer, None)

    return Machine(root, ask)


def write(root: Path, files: dict[str, str]) -> None:
    """Make files under ``root``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def infiniband(root: Path, count: int, gbit: int, *, state="4: ACTIVE", layer="InfiniBand") -> None:
    """Give a machine RDMA ports."""
    for number in range(count):
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        rate = f"{gbit} Gb/sec (4X NDR)\n"
        files = {"state": state, "rate": rate, "link_layer": layer}
        write(root, {f"{port}/{name}": text for name, text in files.items()})


def amd_gpus(root: Path, count: int) -> None:
    """Give a machine MI355X GPUs, all joined by xGMI, and the CPU's node beside them."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write(root, {f"{nodes}/0/properties": "cpu_cores_count 128\ngfx_target_version 0\n"})
    for number in range(1, count + 1):
        node = f"{nodes}/{number}"
        write(root, {f"{node}/properties": "simd_count 1024\ngfx_target_version 90500\n"})
        write(root, {f"{node}/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 309220868096\n"})
        write(root, {f"{node}/name": "AMD Instinct MI355X\n"})
        for link in range(count - 1):
            write(root, {f"{node}/io_links/{link}/properties": "type 11\nversion_major 0\n"})
