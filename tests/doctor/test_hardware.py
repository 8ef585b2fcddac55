"""GPUs, links and networks, as drivers and /sys of pictured machines tell them."""

import time

import pytest
from machine_pictures import B200, GB10, H200, V100, amd_gpus, infiniband, machine, topology, write

from k3tune.doctor import machine as eyes
from k3tune.doctor.gpus import find_gpus
from k3tune.doctor.interconnect import TOKEN_BYTES, interconnect_findings
from k3tune.doctor.machine import Answer, ask


def network_of(picture):
    gpus, _ = find_gpus(picture)
    findings = interconnect_findings(picture, gpus)
    return {finding.topic: finding for finding in findings}


def test_eight_equal_gpus_are_one_finding(tmp_path):
    gpus, [finding] = find_gpus(machine(tmp_path, smi=8 * H200))
    assert len(gpus) == 8 and {gpu.target for gpu in gpus} == {"sm_90"}
    assert finding.level == "ok"
    assert finding.text == "8 x NVIDIA H200, 151 GB each, sm_90"
    assert finding.facts["memory_bytes"] == 143771 << 20 and not finding.facts["native_fp4"]


@pytest.mark.parametrize(
    ("smi", "level", "native", "words"),
    [
        (B200, "ok", True, "sm_100"),
        (V100, "warning", False, "need sm_80 or newer"),
        (GB10, "ok", True, "shared memory"),
        ("NVIDIA RTX 6000 Ada, 49140, 8.9, 535\n", "warning", False, "never compiled"),
    ],
)
def test_a_gpu_is_judged_by_its_architecture(tmp_path, smi, level, native, words):
    _, [finding] = find_gpus(machine(tmp_path, smi=smi))
    assert (finding.level, finding.facts["native_fp4"]) == (level, native)
    assert words in finding.text


def test_amd_gpus_are_read_from_sys(tmp_path):
    amd_gpus(tmp_path, 8)
    picture = machine(tmp_path)
    gpus, [finding] = find_gpus(picture)
    assert finding.text == "8 x AMD Instinct MI355X, 309 GB each, gfx950"
    assert gpus[0].native_fp4
    assert network_of(picture)["links"].level == "ok"


def test_no_gpu_is_a_warning_that_says_what_still_works(tmp_path):
    gpus, [finding] = find_gpus(machine(tmp_path))
    assert gpus == [] and finding.level == "warning"
    assert "k3-nano" in finding.text and "GPU node" in finding.next_step


def test_a_driver_that_does_not_answer_is_a_failure(tmp_path):
    silent = Answer(None, "it did not answer within 4 s")
    gpus, [finding] = find_gpus(machine(tmp_path, smi=silent))
    assert gpus == [] and finding.level == "failure"
    assert finding.text == "nvidia-smi is installed, but it did not answer within 4 s"


def test_asking_stops_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(eyes, "TIMEOUT_S", 0.2)
    begun = time.perf_counter()
    assert ask(["sleep", "20"]) == Answer(None, "it did not answer within 0 s")
    assert time.perf_counter() - begun < 5


def test_a_program_that_fails_is_quoted_and_a_missing_one_is_no_problem():
    failed = ask(["sh", "-c", "echo NVML: version mismatch >&2; exit 18"])
    assert failed.problem == "it ended with status 18: NVML: version mismatch"
    assert ask(["no-such-program-anywhere"]) == Answer(None, None)


@pytest.mark.parametrize(("link", "level"), [("NV18", "ok"), ("PHB", "warning")])
def test_links_between_gpus_are_read_from_the_topology(tmp_path, link, level):
    picture = machine(tmp_path, smi=8 * H200, topo=topology(8, link))
    assert network_of(picture)["links"].level == level


def test_links_that_cannot_be_read_are_not_called_nvlink(tmp_path):
    assert network_of(machine(tmp_path, smi=2 * H200))["links"].level == "warning"


def test_one_gpu_needs_no_links(tmp_path):
    assert list(network_of(machine(tmp_path, smi=H200))) == ["network"]


def test_a_token_crosses_the_network_in_its_latent():
    # 57,344 BF16 values a MoE layer, there and back, forward and backward
    assert TOKEN_BYTES == 57_344 * 2 * 2 * 92 * 2


def test_a_fast_fabric_is_ok_with_its_time_a_step(tmp_path):
    infiniband(tmp_path, 8, 400)
    write(tmp_path, {"sys/module/nvidia_peermem/version": "1"})
    finding = network_of(machine(tmp_path, smi=8 * H200))["network"]
    assert finding.level == "ok" and "InfiniBand mlx5_7:1 400 Gb/s" in finding.text
    # 42.2 GB at 50 GB/s
    assert finding.facts["seconds_per_1000_tokens"] == pytest.approx(0.844, rel=1e-3)
    assert "0.84 s" in finding.text


def test_a_fabric_without_peer_memory_is_a_warning(tmp_path):
    infiniband(tmp_path, 8, 400)
    finding = network_of(machine(tmp_path, smi=8 * H200))["network"]
    assert finding.level == "warning" and "nvidia_peermem" in finding.next_step


def test_one_port_for_eight_gpus_is_too_slow_for_experts_on_several_nodes(tmp_path):
    infiniband(tmp_path, 1, 200, layer="Ethernet")
    finding = network_of(machine(tmp_path, smi=8 * H200))["network"]
    assert finding.level == "warning"
    assert "RoCE mlx5_0:1 200 Gb/s" in finding.text and "25 Gb/s a GPU" in finding.text
    assert "inside a node" in finding.next_step


def test_ports_that_are_down_do_not_count(tmp_path):
    infiniband(tmp_path, 2, 400, state="1: DOWN")
    write(tmp_path, {"sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "10000"})
    write(tmp_path, {"sys/class/net/eth1/operstate": "down", "sys/class/net/eth1/speed": "-1"})
    finding = network_of(machine(tmp_path, smi=2 * H200))["network"]
    assert finding.level == "warning" and "no RDMA port is up" in finding.text
    # 42.2 GB at half of 10 Gb/s
    assert "68 s on 10 Gb/s Ethernet" in finding.text
    assert finding.facts["ethernet_gbit_per_s"] == 10


def test_a_machine_without_gpus_needs_no_network(tmp_path):
    assert network_of(machine(tmp_path))["network"].level == "ok"
