"""Room and speed of the disk under a checkpoint."""

import shutil
from collections import namedtuple

import pytest

from k3tune.doctor import disk
from k3tune.doctor.disk import K3_BYTES, disk_findings
from k3tune.errors import K3TuneError

Usage = namedtuple("Usage", "total used free")


def test_a_checkpoint_is_measured_by_its_own_files(tmp_path):
    (tmp_path / "model-00001-of-000002.safetensors").write_bytes(bytes(3 << 20))
    (tmp_path / "model-00002-of-000002.safetensors").write_bytes(bytes(5 << 20))
    space, speed = disk_findings(tmp_path, True, 0.2)
    assert space.level == "ok" and space.facts["checkpoint_bytes"] == 8 << 20
    assert speed.facts["measured_bytes"] == 5 << 20
    rate = speed.facts["read_bytes_per_s"]
    assert speed.facts["load_s"] == pytest.approx((8 << 20) / rate, abs=0.06)


def test_a_folder_is_held_against_k3_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(2e12, 0, 1_600_000_000_000))
    space, speed = disk_findings(tmp_path, False, 0.3)
    assert space.level == "ok" and "enough for Kimi K3's 1.56 TB" in space.text
    assert speed.facts["load_s"] == pytest.approx(
        K3_BYTES / speed.facts["read_bytes_per_s"], rel=1e-2
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_for_k3_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(1e12, 0, 50_000_000_000))
    space, _ = disk_findings(tmp_path, False, 0.1)
    assert space.level == "warning" and "50 GB free" in space.text
    assert "k3-nano needs none of it" in space.next_step


@pytest.mark.parametrize(
    ("bytes_per_s", "level", "words"),
    [
        (7.0e9, "ok", "reads 7 GB/s: Kimi K3's checkpoint (1.56 TB) in 4 min"),
        (0.2e9, "warning", "in 2.2 h"),
        (50e9, "ok", "the disk was not measured"),
    ],
)
def test_the_time_to_load_decides(tmp_path, monkeypatch, bytes_per_s, level, words):
    measured = disk.Speed(bytes_per_s, 1 << 30)
    monkeypatch.setattr(disk, "_write_and_read", lambda folder, budget_s: measured)
    _, speed = disk_findings(tmp_path, False, 0.1)
    assert speed.level == level and words in speed.text


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    _, speed = disk_findings(tmp_path, False, 0.1)
    assert speed.level == "warning" and "not measured: Permission denied" in speed.text


def test_a_checkpoint_that_is_none_is_one_sentence(tmp_path):
    with pytest.raises(K3TuneError, match=r"holds no \*.safetensors"):
        list(disk_findings(tmp_path, True, 0.1))
    shutil.rmtree(tmp_path)
    with pytest.raises(K3TuneError, match="is no folder"):
        list(disk_findings(tmp_path, True, 0.1))
