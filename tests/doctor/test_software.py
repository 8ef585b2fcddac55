"""Versions, traps, compilers, and the path they leave to the routed experts."""

import pytest
from machine_pictures import B200, H200, V100, machine, write
from packaging.requirements import Requirement

from k3tune.doctor import experts, traps, versions
from k3tune.doctor.experts import compiler_findings, path_finding
from k3tune.doctor.gpus import find_gpus
from k3tune.doctor.machine import Machine
from k3tune.doctor.traps import trap_findings
from k3tune.doctor.versions import installed, package_findings, python_finding
from k3tune_kernels.cpu import build

AVX512_BF16 = "avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512vbmi"


def with_versions(**changed):
    """A lookup of packages as they are installed here, but for some."""
    names = {name.replace("_", "-"): version for name, version in changed.items()}
    return lambda name: names[name] if name in names else installed(name)


def packages(**changed):
    return {finding.topic: finding for finding in package_findings(with_versions(**changed))}


def traps_of(gpu, environment=(), **changed):
    findings = trap_findings(gpu, with_versions(**changed), dict(environment))
    return [finding for finding in findings if finding.level != "ok"]


def test_this_environment_fits():
    [finding] = packages().values()
    assert finding.level == "ok"
    assert finding.facts["trl"] == installed("trl") and "torch" in finding.facts


def test_a_package_outside_its_range_is_a_failure_with_the_command():
    finding = packages(trl="1.15.2")["trl"]
    assert finding.level == "failure"
    assert finding.text == "1.15.2 is outside the range <1.17,>=1.16"
    assert finding.next_step == 'pip install "trl<1.17,>=1.16"'


def test_a_missing_package_is_a_failure():
    finding = packages(peft=None)["peft"]
    assert finding.level == "failure" and "not installed" in finding.text


@pytest.mark.parametrize(("version", "level"), [("2.13.7", None), ("2.20.0+cu132", "warning")])
def test_a_package_newer_than_the_tested_one_is_a_warning(version, level):
    finding = packages(torch=version).get("torch")
    assert (finding and finding.level) == level


def test_k3tune_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(versions.metadata, "requires", lambda name: raise_not_found())
    [finding] = package_findings()
    assert finding.level == "warning" and "pip install -e ." in finding.next_step


def raise_not_found():
    raise versions.metadata.PackageNotFoundError


@pytest.mark.parametrize(("version", "level"), [((3, 10, 9), "failure"), ((3, 12, 1), "ok")])
def test_python_must_be_new_enough(version, level):
    assert python_finding(version).level == level


def test_fla_is_a_failure_on_a_cpu_and_wanted_on_a_gpu():
    [finding] = traps_of(False, fla_core="0.6.1")
    assert (finding.topic, finding.level) == ("fla", "failure")
    assert "pip uninstall fla-core" in finding.next_step
    assert traps_of(True, fla_core="0.6.1") == []
    [finding] = traps_of(True, fla_core=None, flash_linear_attention=None)
    assert (finding.topic, finding.level) == ("fla", "warning")


@pytest.mark.parametrize(("version", "sprung"), [("3.7.1", False), ("3.9.0", True), (None, True)])
def test_triton_must_be_the_one_that_a_cuda_wheel_of_torch_pins(monkeypatch, version, sprung):
    pinned = {"triton": Requirement("triton==3.7.1")}
    monkeypatch.setattr(traps, "requirements", lambda of: pinned)
    found = traps_of(False, triton=version)
    assert [finding.level for finding in found] == ["failure"] * sprung
    assert all(finding.next_step == 'pip install "triton==3.7.1"' for finding in found)


def test_an_old_kernels_package_is_a_warning():
    [finding] = traps_of(False, kernels="0.12.0")
    assert (finding.topic, finding.level) == ("kernels", "warning")
    assert traps_of(False, kernels="0.18.2") == []


def test_the_interpreter_of_triton_is_a_warning():
    [finding] = traps_of(False, {"TRITON_INTERPRET": "1"})
    assert (finding.topic, finding.next_step) == ("triton", "unset TRITON_INTERPRET")


@pytest.mark.parametrize(
    ("smi", "changed", "path", "words"),
    [
        (8 * H200, {}, "triton", "sm_90 has no MXFP4 arithmetic"),
        (8 * B200, {}, "triton", "takes MXFP4 operands natively, but training keeps BF16"),
        (H200, {"triton": None}, "reference", "triton is not installed"),
        (V100, {}, "reference", "sm_70 has no kernels"),
    ],
)
def test_the_experts_path_on_a_gpu(tmp_path, smi, changed, path, words):
    picture = machine(tmp_path, smi=smi)
    gpus, _ = find_gpus(picture)
    finding = path_finding(picture, gpus, with_versions(**changed))
    assert finding.facts["path"] == path and words in finding.text
    assert (finding.level == "ok") == (path == "triton")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx2 fma", "avx2"),
        (f"avx2 fma {AVX512_BF16}", "avx512_bf16"),
        (f"avx2 fma {AVX512_BF16} amx_bf16 amx_tile", "amx_bf16"),
        ("fpu sse2", "portable"),
    ],
)
def test_the_experts_path_on_a_cpu(tmp_path, monkeypatch, flags, name):
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + build.source_digest().encode())
    monkeypatch.setattr(build, "LIBRARY", library)
    write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    finding = path_finding(machine(tmp_path), [])
    assert (finding.level, finding.facts["path"]) == ("ok", "cpu")
    assert f"{name}:" in finding.text


@pytest.mark.parametrize("content", [None, b"built long ago"])
def test_without_a_library_the_reference_runs_and_the_build_is_the_next_step(
    tmp_path, monkeypatch, content
):
    library = tmp_path / "library.so"
    if content:
        library.write_bytes(content)
    monkeypatch.setattr(build, "LIBRARY", library)
    finding = path_finding(machine(tmp_path), [])
    assert (finding.level, finding.facts["path"]) == ("warning", "reference")
    assert finding.next_step == "python -m k3tune_kernels.cpu.build"


def test_a_missing_compiler_is_a_failure_only_where_triton_needs_it(monkeypatch, tmp_path):
    def no_compiler():
        raise build.BuildError("no C++ compiler found")

    monkeypatch.setattr(build, "find_compiler", no_compiler)
    gpus, _ = find_gpus(machine(tmp_path, smi=H200))
    assert next(compiler_findings(gpus)).level == "failure"
    monkeypatch.setattr(experts, "library_obstacle", lambda: "it was not built")
    assert [finding.level for finding in compiler_findings([])] == ["warning"]
    monkeypatch.setattr(experts, "library_obstacle", lambda: None)
    assert [finding.level for finding in compiler_findings([])] == ["ok"]


def test_missing_headers_of_python_are_a_failure_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(experts.sysconfig, "get_path", lambda name: str(tmp_path))
    gpus, _ = find_gpus(machine(tmp_path, smi=H200))
    [finding] = [finding for finding in compiler_findings(gpus) if finding.level == "failure"]
    assert "python3-dev" in finding.next_step


def test_the_instruction_set_is_the_one_the_library_chooses():
    from k3tune_kernels.cpu import library

    if library.obstacle():
        pytest.skip(library.obstacle())
    assert f", {library.isas()[0]}:" in path_finding(Machine(), []).text
