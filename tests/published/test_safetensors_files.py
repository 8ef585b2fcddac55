"""Hostile and damaged headers give a message, never a crash or a giant allocation."""

import json
import pickle
import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tune.errors import CheckpointError
from k3tune.published.safetensors_files import ShardReader, StoredTensor, read_header


def _file(folder, header, payload=b"\0" * 8, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "x.safetensors"
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + payload)
    return file


def _tensor(begin, end, dtype="U8", shape=None):
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_sound_header_gives_absolute_places(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": _tensor(2, 8, "BF16", [3, 1]),
        "a": _tensor(0, 2),
    }
    file = _file(tmp_path, header)
    start = file.stat().st_size - 8
    assert read_header(file) == {
        "b": StoredTensor(file, "BF16", (3, 1), start + 2, 6),
        "a": StoredTensor(file, "U8", (2,), start, 2),
    }


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param(b"{no json", "does not parse", id="not_json"),
        pytest.param(b"{" + b"\xff" * 9, "does not parse", id="not_utf8"),
        pytest.param(b'{"a":' + b"[" * 100_000, "does not parse", id="deep"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "does not parse", id="endless_number"),
        pytest.param(b"[1, 2]", "opens with '{'", id="list"),
        pytest.param(b'{"a": {}, "a": {}}', "key 'a' stands twice", id="key_twice"),
        pytest.param(rb'{"\udc00": {}}', "does not parse", id="half_a_character"),
        pytest.param({"a\x1b[2J": {}}, r"found tensor 'a\\x1b\[2J'", id="control_character"),
        pytest.param({"a" * 5000: {}}, r"found tensor 'a+\.\.\.", id="endless_name"),
        pytest.param({"a": 3}, "tensor a: expected a dtype", id="no_object"),
        pytest.param({"a": {}}, "tensor a: expected a dtype of .* found None", id="no_fields"),
        pytest.param({"a": _tensor(0, 8, "U7")}, "expected a dtype of .* found 'U7'", id="dtype"),
        pytest.param({"a": _tensor(0, 8, ["U8"])}, "expected a dtype", id="dtype_list"),
        pytest.param({"a": _tensor(0, 8, shape="8")}, "expected a shape", id="shape_text"),
        pytest.param({"a": _tensor(0, 8, shape=[-8])}, "expected a shape", id="shape_negative"),
        pytest.param({"a": _tensor(0, 8, shape=[True])}, "expected a shape", id="shape_bool"),
        pytest.param({"a": _tensor(0, 8, shape=[2**70])}, "expected a shape", id="shape_huge"),
        pytest.param({"a": _tensor(0, 8, shape=[1] * 99)}, "at most 16 sizes", id="rank"),
        pytest.param({"a": _tensor(0, 8, shape=[9])}, "expected 9 bytes for U8", id="size"),
        pytest.param({"a": _tensor(8, 0, shape=[8])}, "expected data_offsets", id="reversed"),
        pytest.param({"a": _tensor(-8, 0)}, r"expected data_offsets \[begin, end\]", id="before"),
        pytest.param(
            {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}},
            r"expected data_offsets \[begin, end\]",
            id="three_offsets",
        ),
        pytest.param(
            {"a": _tensor(0, 6), "b": _tensor(4, 8)}, "tensor b: .*byte 6 .*found 4", id="overlap"
        ),
        pytest.param({"a": _tensor(0, 4), "b": _tensor(6, 8)}, "overlap or leave a gap", id="gap"),
        pytest.param({"a": _tensor(0, 2**60)}, "tensor a: .*truncated", id="beyond_the_file"),
        pytest.param({"a": _tensor(0, 5)}, "expected [0-9]+ bytes as its header", id="left_over"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, header, message):
    file = _file(tmp_path, header)
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{message}") as caught:
        read_header(file)
    assert str(caught.value).endswith("download the file again")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "content",
    [{"a": [1.5]}, OrderedDict(a=1), [1, 2, 3], ("weights", b"\0" * 100), [], 3],
    ids=lambda content: type(content).__name__,
)
def test_a_pickle_of_any_protocol_is_called_one(tmp_path, protocol, content):
    file = tmp_path / "x.safetensors"
    file.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(CheckpointError, match=r"expected safetensors, found .*a pickle.*refuses"):
        read_header(file)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"<!DOCTYPE html><html>", b"version https://git-lfs", b"(" + b"\0" * 20],
)
def test_other_content_is_not_called_a_pickle(tmp_path, content):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**12, 99_000_000])
def test_a_huge_header_length_allocates_nothing(tmp_path, length):
    file = _file(tmp_path, {"a": _tensor(0, 8)}, length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=str(length)):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@given(content=st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(content)
    try:
        read_header(file)
    except CheckpointError as error:
        assert "any.safetensors" in str(error)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)
    with pytest.raises(CheckpointError, match=r"none: cannot be read \(No such file"):
        ShardReader(tmp_path / "none")
