"""Files of the commands: read with a sentence for every fault, replaced whole or not at all."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3tune.errors import K3TuneError
from k3tune.files import parse_ids, read_id_rows, refuse_same_file, replace_file

ROOT = Path(__file__).parents[1]

KILLED = """
import os, signal, sys
from k3tune.files import replace_file

with replace_file(sys.argv[1]) as file:
    file.write("half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _sentence(caught):
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600, message
    return message


def _write(path, text="new"):
    with replace_file(path) as file:
        file.write(text)


def _age(path):
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1 2 3", [1, 2, 3]),
        ("1,2, 3", [1, 2, 3]),
        (" [1, 2 3] ", [1, 2, 3]),
        ("[]", []),
        ("", []),
        ("-1", [-1]),
        ("7", [7]),
    ],
)
def test_ids_are_read_with_spaces_or_commas_and_with_or_without_brackets(text, ids):
    assert parse_ids(text, "--prompt-ids") == ids


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1 x", "holds 'x', expected token ids"),
        ("1.5", "holds '1.5'"),
        ("9" * 5000, "999..., expected token ids"),
        ("[1, 2", "expected both brackets or none"),
        ("1, 2]", "expected both brackets or none"),
        ("[", "expected both brackets or none"),
        ("[[1]]", "holds '[1]'"),
        ("1,,2", "on both sides of each comma"),
        ("1,", "on both sides of each comma"),
        ("[,1]", "on both sides of each comma"),
        (",", "on both sides of each comma"),
    ],
    ids=lambda value: value[:9],
)
def test_other_text_is_no_row_of_ids(text, part):
    with pytest.raises(K3TuneError, match="--prompt-ids holds") as caught:
        parse_ids(text, "--prompt-ids")
    assert part in _sentence(caught)


def test_a_byte_order_mark_before_rows_is_skipped(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf[1, 2]\n[]\n")
    assert read_id_rows(file) == [[1, 2], []]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("[" + "9" * 5000 + "]", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ('["' + "a" * 5000 + '"]', "line 2 holds 'aaa"),
        ("{}", "line 2 is a JSON dict"),
    ],
    ids=["endless_number", "deep", "text", "object"],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, part):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"[1]\n{line}\n")
    with pytest.raises(K3TuneError) as caught:
        read_id_rows(file)
    assert part in _sentence(caught) and "expected" in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "no/folder/x"], ids=ascii)
def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path, name):
    with pytest.raises(K3TuneError, match="cannot read ") as caught:
        read_id_rows(tmp_path / name)
    assert "check its name" in _sentence(caught)
    with pytest.raises(K3TuneError, match="cannot write ") as caught:
        _write(tmp_path / name)
    assert "check its name" in _sentence(caught)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_a_file_can_have_is_written(tmp_path):
    _write(tmp_path / ("x" * 255))
    assert [file.name for file in tmp_path.iterdir()] == ["x" * 255]


def test_a_loop_of_links_is_one_sentence(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(K3TuneError, match="cannot write ") as caught:
        _write(tmp_path / "a")
    _sentence(caught)


def test_a_folder_closed_to_writing_is_one_sentence(tmp_path, monkeypatch):
    # no folder is closed to root, as whom tests may run
    def closed(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(K3TuneError, match="Permission denied: check its name"):
        _write(tmp_path / "x")


def test_a_disk_that_fills_up_is_one_sentence_and_keeps_the_old_content(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    said = r"cannot write .*x: No space left on device: make room there"
    with pytest.raises(K3TuneError, match=said):
        _write(tmp_path / "x")
    # and while a long text is still being written
    with pytest.raises(K3TuneError, match=said), replace_file(tmp_path / "x"):
        full(None)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_file_and_folder_are_synced_in_this_order(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    _write(tmp_path / "x")
    file, folder = synced
    assert Path(file).parent == tmp_path and folder == str(tmp_path)


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "x")], env=os.environ | {"PYTHONPATH": path}
    )
    [left] = tmp_path.iterdir()
    assert killed.returncode == -9 and left.read_text() == "half"
    _age(left)
    _write(tmp_path / "x")
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_file_another_run_is_writing_is_left_alone(tmp_path):
    with replace_file(tmp_path / "slow") as file:
        file.write("slow")
        file.flush()
        _age(file.name)
        _write(tmp_path / "quick")
        assert Path(file.name).exists()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "slow": "slow",
        "quick": "new",
    }


@pytest.mark.parametrize("link", ["same", "symlink", "hardlink"])
def test_an_output_that_is_the_input_is_refused(tmp_path, link):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("[1]\n")
    if link == "same":
        out = tmp_path / "." / "rows.jsonl"
    elif link == "symlink":
        out.symlink_to(rows)
    else:
        out.hardlink_to(rows)
    with pytest.raises(K3TuneError, match=r"it is the input .*rows\.jsonl, expected another file"):
        refuse_same_file(rows, out)


def test_an_output_that_is_new_or_another_file_is_taken(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1]\n")
    refuse_same_file(rows, tmp_path / "new.jsonl")
    (tmp_path / "old.jsonl").write_text("[1]\n")
    refuse_same_file(rows, tmp_path / "old.jsonl")
