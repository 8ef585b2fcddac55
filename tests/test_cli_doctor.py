"""``k3tune doctor`` through its own door."""

import json
import resource
import subprocess
import sys
import time

import pytest

from command_line import run_command
from k3tune.doctor import examination
from k3tune.doctor.finding import LEVELS, Finding

# It waits for the disk for 0.3 s, and for the answers of drivers where there are any.
_QUICK_CPU_S = 1.5


@pytest.fixture
def run(capsys):
    return lambda *arguments: run_command(capsys, *arguments)


def test_quick_answers_within_three_seconds_and_without_torch(repository):
    code = "import sys, k3tune.cli\ntry:\n    k3tune.cli.main(['doctor', '--quick', '--json'])\n"
    code += "finally:\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if took_s < _QUICK_CPU_S:
            break
    assert result.stderr == "" and result.returncode in (0, 1)
    assert json.loads(result.stdout)["findings"]
    assert took_s < _QUICK_CPU_S


def test_the_whole_examination_takes_less_than_fifteen_seconds(run, fixtures):
    # of the CPU: what it waits for, disks and drivers, has time limits of its own
    begun = time.process_time()
    status, out, err = run("doctor", "--base", fixtures / "k3_tiny", "--json")
    assert time.process_time() - begun < 8
    said = json.loads(out)
    assert err == "" and status == (said["verdict"] == "failure")
    topics = {finding["topic"] for finding in said["findings"]}
    assert topics >= {"python", "packages", "fla", "triton", "kernels", "compiler", "gpu"}
    assert topics >= {"network", "experts", "disk", "disk speed", "torch", "self-test"}
    for finding in said["findings"]:
        assert finding["level"] in LEVELS and finding["text"]
        assert finding["level"] == "ok" or finding["next_step"]


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warning", 0), ("failure", 1)], ids=str)
def test_only_a_failure_sets_the_exit_status(run, monkeypatch, level, status):
    found = [Finding("disk", "ok", "fine"), Finding("gpu", level, "said", "do this")]
    monkeypatch.setattr(examination, "examine", lambda base, quick: iter(found))
    code, out, _ = run("doctor")
    assert code == status
    assert f"{level if level == 'ok' else level.upper()}" in out and "-> do this" in out
    assert json.loads(run("doctor", "--json")[1])["verdict"] == level


def test_a_base_that_is_none_is_one_sentence(run, tmp_path):
    status, out, err = run("doctor", "--quick", "--base", tmp_path / "missing")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "is no folder, expected a checkpoint's" in err


def test_a_torch_that_cannot_be_imported_is_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "k3tune.doctor.self_test", None)
    *_, finding = examination.examine()
    assert (finding.topic, finding.level) == ("torch", "failure")
    assert "cannot be imported" in finding.text


def test_help_names_every_option(run):
    status, out, _ = run("doctor", "--help")
    assert status == 0 and all(option in out for option in ("--base", "--quick", "--json"))
