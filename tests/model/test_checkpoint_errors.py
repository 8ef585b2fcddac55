"""Every way a checkpoint can be wrong is refused with a message that names it."""

import json
import os
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_checkpoint, make_config, make_weights, write_checkpoint
from k3tune.errors import CheckpointError, ConfigError
from k3tune.model.checkpoint import load_base, load_weights
from k3tune.model.configuration import K3Config
from k3tune.model.modeling import K3ForCausalLM

INDEX = "model.safetensors.index.json"
FIRST, SECOND, GLOBALS = (f"model-0000{n}-of-000007.safetensors" for n in (1, 2, 5))
NORM = "language_model.model.norm.weight"
GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
SCALE = "language_model.model.layers.1.block_sparse_moe.experts.4.w2.weight_scale"
A_LOG = "language_model.model.layers.1.self_attn.A_log"


@pytest.fixture
def folder(tmp_path):
    return build_checkpoint(tmp_path)


def _refused(folder, *parts, error=CheckpointError, **arguments):
    """Load and require each of ``parts`` in the message, in this order."""
    with pytest.raises(error) as caught:
        load_base(folder, **arguments)
    message = str(caught.value)
    assert re.search(".*".join(map(re.escape, map(str, parts))), message, re.DOTALL), message


def _edit_file(file, edit):
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)


def _edit_json(file, edit):
    table = json.loads(file.read_text())
    edit(table)
    file.write_text(json.dumps(table))


def _edit_index(folder, edit):
    _edit_json(folder / INDEX, lambda index: edit(index["weight_map"]))


def test_missing_shard(folder):
    (folder / SECOND).unlink()
    _refused(folder, SECOND, "expected a shard with", "text tensors", "found no such file")


def test_no_shard_at_all(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    _refused(folder, folder, "expected safetensors files", FIRST, "found none")


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1, -5000])
def test_truncated_shard(folder, size):
    file = folder / SECOND
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    _refused(folder, SECOND, "expected", "found", "truncated", "download the file again")


def test_truncated_payload_names_the_tensor_and_both_sizes(folder):
    file = folder / FIRST
    size = file.stat().st_size
    os.truncate(file, size - 1)
    _refused(folder, FIRST, "tensor language_model.", f"up to byte {size}", f"of {size - 1} bytes")


def test_shard_that_shrinks_during_the_load(folder, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    _refused(folder, FIRST, "tensor language_model.", "expected", "found 0", "truncated while")


def test_read_error(folder, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    _refused(folder, FIRST, "tensor language_model.", "cannot be read (Input/output error)")


def test_missing_text_tensor(folder):
    _edit_file(folder / GLOBALS, lambda weights: weights.pop(NORM))
    _edit_index(folder, lambda files: files.pop(NORM))
    _refused(folder, INDEX, f"tensor {NORM}", "expected", "BF16 [64]", "found no such tensor")


def test_missing_text_tensor_in_one_file_without_index(tmp_path):
    build_checkpoint(tmp_path, single=True)
    _edit_file(tmp_path / "model.safetensors", lambda weights: weights.pop(NORM))
    _refused(tmp_path, "model.safetensors", f"tensor {NORM}", "found no such tensor")


def test_extra_text_tensor(folder):
    name = "language_model.model.layers.1.self_attn.q_proj.bias"
    _edit_file(folder / SECOND, lambda weights: weights.update({name: torch.zeros(3)}))
    _edit_index(folder, lambda files: files.update({name: SECOND}))
    _refused(folder, INDEX, f"tensor {name}", "expected only", "found this one beside them")


def test_a_config_with_other_sizes_lists_the_first_and_counts_the_rest(folder):
    _edit_json(folder / "config.json", lambda c: c["text_config"].update(num_experts=7))
    _refused(folder, INDEX, "layers.1", "experts.6.w1.weight_packed", "more: k3tune inspect")


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        pytest.param(GATE, lambda t: t.T.contiguous(), "BF16 [64, 6]", id="transposed"),
        pytest.param(GATE, lambda t: t.float(), "F32 [6, 64]", id="dtype"),
        pytest.param(SCALE, lambda t: t.view(torch.int8), "I8 [32, 1]", id="scale_dtype"),
        pytest.param(A_LOG, lambda t: t[:1].clone(), "F32 [1]", id="a_log_too_short"),
        pytest.param(A_LOG, lambda t: t.bfloat16(), "BF16 [7]", id="a_log_dtype"),
    ],
)
def test_wrong_shape_or_dtype(folder, name, change, found):
    _edit_file(folder / SECOND, lambda weights: weights.update({name: change(weights[name])}))
    _refused(folder, SECOND, f"tensor {name}", "expected", f"found {found}")


def test_index_that_names_the_wrong_file(folder):
    _edit_index(folder, lambda files: files.update({GATE: FIRST}))
    _refused(folder, FIRST, f"tensor {GATE}", f"expected here by {INDEX}", f"found in {SECOND}")


def test_index_that_names_a_file_without_the_tensor(folder):
    _edit_file(folder / SECOND, lambda weights: weights.pop(GATE))
    _refused(folder, SECOND, f"tensor {GATE}", f"expected here by {INDEX}", "found in no file")


def test_file_with_a_tensor_the_index_lacks(folder):
    _edit_index(folder, lambda files: files.pop(GATE))
    _refused(folder, SECOND, f"tensor {GATE}", f"expected in {INDEX}", "found only in the file")


def test_tensor_in_two_files(folder):
    _edit_file(folder / GLOBALS, lambda weights: weights.update({GATE: torch.zeros(6, 64)}))
    _refused(folder, GLOBALS, f"tensor {GATE}", "expected in one file", f"found in {SECOND}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param(b"{", ("expected a JSON object", "does not parse"), id="cut"),
        pytest.param(b"\xff\xfe", ("expected a JSON object", "does not parse"), id="binary"),
        pytest.param(b"[" * 100_000, ("does not parse",), id="nested"),
        pytest.param(b"[]", ("expected a JSON object", "found a list"), id="list"),
        pytest.param(b"{}", ("expected a weight_map", "found None"), id="no_weight_map"),
        pytest.param(b'{"weight_map": {"a": 1}}', ("expected a weight_map",), id="no_name"),
        pytest.param(b'{"weight_map": {"a": "b", "a": "c"}}', ("'a' stands twice",), id="twice"),
        pytest.param(
            b'{"weight_map": {"a": "../x.safetensors"}}',
            ("in the same folder", "'../x.safetensors'"),
            id="elsewhere",
        ),
    ],
)
def test_unusable_index(folder, text, parts):
    (folder / INDEX).write_bytes(text)
    _refused(folder, INDEX, *parts)


def test_shards_without_index(folder):
    (folder / INDEX).unlink()
    _refused(folder, INDEX, f"beside {FIRST} and 6 more", "found no such file")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scale_of_255(folder, dtype):
    def damage(weights):
        weights[SCALE][17, 0] = 255

    _edit_file(folder / SECOND, damage)
    _refused(folder, SECOND, f"tensor {SCALE}", "0 to 254", "found 255", "row 17, group 0")
    load_base(folder, experts=[3, 5], dtype=dtype)


def test_a_log_tail_that_is_not_zero(folder):
    def damage(weights):
        weights[A_LOG][4] = 0.5

    _edit_file(folder / SECOND, damage)
    _refused(folder, SECOND, f"tensor {A_LOG}", "expected 2 values", "found 0.5 at position 4 of 7")


def test_native_kimi_linear_config(tmp_path):
    config = {"model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(
        tmp_path,
        "kimi_linear",
        "lacks fields",
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "linear_attn_config",
        error=ConfigError,
    )


def test_unknown_hidden_act(folder):
    _edit_json(folder / "config.json", lambda c: c["text_config"].update(hidden_act="silu"))
    _refused(folder, "hidden_act is 'silu'", "expected 'situ'", error=ConfigError)


def test_folder_that_is_not_there(tmp_path):
    _refused(tmp_path / "none", "expected", "config.json", "found no", error=ConfigError)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickle_under_a_safetensors_name(folder, zipped):
    torch.save({"a": torch.zeros(3)}, folder / SECOND, _use_new_zipfile_serialization=zipped)
    _refused(folder, SECOND, "expected safetensors, found a pickle", "refuses it")


def test_pickle_as_the_only_file(tmp_path):
    build_checkpoint(tmp_path, single=True)
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    _refused(tmp_path, "model.safetensors", "found a pickle")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    _refused(tmp_path, "pytorch_model.bin", "expected safetensors, found a pickle")


def test_pickle_in_place_of_the_shards(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    _refused(folder, "pytorch_model.bin", "expected safetensors, found a pickle")


def test_index_of_pickles(folder):
    _edit_index(folder, lambda files: files.update({GATE: "pytorch_model-00001.bin"}))
    _refused(folder, "pytorch_model-00001.bin", "expected safetensors, found a pickle")


def test_path_of_a_file(folder):
    _refused(folder / FIRST, FIRST, "expected a checkpoint folder, found a file")


def test_a_header_of_640_bytes_is_no_pickle(tmp_path):
    weights = make_weights(make_config())
    folder = write_checkpoint(tmp_path, make_config(), weights)
    norms = {NORM: weights[NORM]}
    for padding in range(1, 700):
        save_file(norms, folder / "x.safetensors", metadata={"pad": "x" * padding})
        if (folder / "x.safetensors").read_bytes().startswith(b"\x80\x02"):
            break
    else:
        pytest.fail("no metadata length gave a header of 640 bytes")
    _edit_file(folder / GLOBALS, lambda table: table.pop(NORM))
    _edit_index(folder, lambda files: files.update({NORM: "x.safetensors"}))
    assert torch.equal(load_base(folder).model.norm.weight, weights[NORM])


@pytest.mark.parametrize("offline", [True, False], ids=["offline_mode", "no_network"])
def test_hub_id_without_network(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    _refused(
        "example/Kimi-K3",
        "example/Kimi-K3: expected a folder or a hub repository",
        "the download failed (LocalEntryNotFoundError",
        "pass a local folder",
    )


def test_hub_id_is_downloaded_without_pickles_and_code(folder, monkeypatch):
    asked = []

    def download(repository, *, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_base("example/Kimi-K3").config.name_or_path == "example/Kimi-K3"
    assert asked == [("example/Kimi-K3", ["*.json", "*.safetensors"])]


def test_model_of_another_config(folder):
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_dict(make_config(vocab_size=96)))
    with pytest.raises(ConfigError, match=r"lm_head\.weight: expected \(160, 64\).*\(96, 64\)"):
        load_weights(model, folder)


def test_a_failed_load_leaves_the_model_empty(folder):
    last = folder / "model-00004-of-000007.safetensors"
    _edit_file(last, lambda weights: [w.fill_(255) for n, w in weights.items() if "scale" in n])
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_dict(make_config()))
    with pytest.raises(CheckpointError, match="found 255"):
        load_weights(model, Path(folder))
    assert all(parameter.is_meta for parameter in model.parameters())
