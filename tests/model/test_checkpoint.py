"""What a load puts into the model, and what it reads for it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import ODD_SHAPES, build_checkpoint, make_config, make_weights, write_checkpoint
from k3tune.model.checkpoint import load_base, load_weights
from k3tune.model.configuration import K3Config
from k3tune.model.modeling import K3ForCausalLM
from k3tune.published.safetensors_files import ShardReader, read_header
from k3tune.published.survey import survey_checkpoint

ROOT = Path(__file__).parents[2]
SHAPE = ODD_SHAPES["three_heads_seven_experts"]
LAYER = "model.layers.1.block_sparse_moe"
KEPT_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def _expected(config, weights, dtype, experts):
    """The model's parameters, built from the published tensors the slow way."""
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    expected = {}
    for name, tensor in weights.items():
        if not name.startswith("language_model.") or ".experts." in name:
            continue
        tensor = tensor[:heads] if name.endswith("A_log") else tensor
        expected[name.removeprefix("language_model.")] = (
            tensor if name.endswith(KEPT_F32) else tensor.to(dtype)
        )
    for layer in range(1, config["text_config"]["num_hidden_layers"]):
        stack = f"model.layers.{layer}.block_sparse_moe.experts"
        for projection in ("w1", "w2", "w3"):
            for part in ("packed", "scale"):
                rows = [
                    weights[f"language_model.{stack}.{expert}.{projection}.weight_{part}"]
                    for expert in experts
                ]
                expected[f"{stack}.{projection}.{part}"] = torch.stack(rows)
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("experts", [None, [5, 0, 3]], ids=["all", "three_in_own_order"])
@pytest.mark.parametrize("single", [False, True], ids=["sharded", "one_file"])
def test_every_parameter_equals_its_published_tensor(tmp_path, dtype, experts, single):
    config = make_config(**SHAPE)
    weights = make_weights(config)
    write_checkpoint(tmp_path, config, weights, single=single)
    model = load_base(tmp_path, dtype=dtype, experts=experts)
    loaded = dict(model.named_parameters())
    expected = _expected(config, weights, dtype, range(7) if experts is None else experts)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def test_tensors_larger_than_the_staging_buffer_are_converted_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("k3tune.model.checkpoint._STAGING_BYTES", 24)
    config = make_config()
    weights = make_weights(config)
    model = load_base(write_checkpoint(tmp_path, config, weights), dtype=torch.float32)
    expected = weights["language_model.model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, expected.float())


def test_the_base_is_frozen_in_eval_mode_and_carries_its_report(tmp_path):
    model = load_base(build_checkpoint(tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.load_report.tensors == len(survey_checkpoint(tmp_path).expected)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert model.config.name_or_path == str(tmp_path)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_synthetic_checkpoints_give_finite_spread_logits(tmp_path, shape):
    model = load_base(build_checkpoint(tmp_path, **ODD_SHAPES[shape]), dtype=torch.float32)
    ids = torch.randint(0, 150, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    assert 0.5 < logits.std() < 5
    assert (logits[0, 0] - logits[0, -1]).abs().mean() > 0.1


def test_only_the_bytes_of_the_asked_experts_are_read(tmp_path, monkeypatch):
    build_checkpoint(tmp_path, **SHAPE)
    reads = []
    read_into = ShardReader.read_into

    def recorded(self, name, offset, buffer):
        reads.append((self.file.name, offset, len(buffer)))
        read_into(self, name, offset, buffer)

    monkeypatch.setattr(ShardReader, "read_into", recorded)
    report = load_base(tmp_path, experts=[6, 2]).load_report
    wanted = {
        (tensor.file.name, tensor.offset, tensor.size_bytes)
        for name, tensor in survey_checkpoint(tmp_path).stored.items()
        if name.startswith("language_model.")
        and (".experts." not in name or ".experts.6." in name or ".experts.2." in name)
    }
    assert set(reads) == wanted and len(reads) == len(wanted)
    assert report.bytes_read == sum(size for _, _, size in reads)
    assert report.tensors == len(reads)
    assert report.experts == (6, 2)
    assert report.expert_tensors_skipped == 8 * 5 * 6


def test_shares_of_the_experts_add_up_to_the_whole(tmp_path):
    build_checkpoint(tmp_path, **SHAPE)
    whole = load_base(tmp_path).load_report
    shares = [load_base(tmp_path, experts=ids).load_report for ids in ([0, 1, 2], [3, 4, 5, 6])]
    stored = survey_checkpoint(tmp_path).stored
    routed = sum(t.size_bytes for n, t in stored.items() if ".experts." in n)
    trunk = whole.bytes_read - routed
    assert sum(share.bytes_read for share in shares) == routed + 2 * trunk


def test_the_image_tower_is_skipped_counted_and_logged(tmp_path, caplog):
    build_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO, logger="k3tune.model.checkpoint"):
        report = load_base(tmp_path).load_report
    assert (report.vision_tensors_skipped, report.vision_bytes_skipped) == (2, 32)
    assert "skipped 2 image-tower tensors (32 bytes)" in caplog.text


def test_a_text_only_copy_without_the_image_tower_loads(tmp_path):
    build_checkpoint(tmp_path)
    for file in tmp_path.glob("model-*.safetensors"):
        if any(not name.startswith("language_model.") for name in read_header(file)):
            file.unlink()
    report = load_base(tmp_path).load_report
    assert (report.vision_tensors_skipped, report.vision_bytes_skipped) == (2, 0)


def test_tensors_may_lie_in_any_order_over_any_files(tmp_path):
    config = make_config()
    weights = make_weights(config)
    write_checkpoint(tmp_path / "layers", config, weights)
    folder = tmp_path / "scattered"
    names = sorted(weights, key=lambda name: name[::-1])
    for part, chunk in enumerate((names[0::3], names[1::3], names[2::3])):
        folder.mkdir(exist_ok=True)
        save_file({name: weights[name] for name in chunk}, folder / f"part-{part}.safetensors")
    index = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    scattered = dict(load_base(folder).named_parameters())
    for name, parameter in load_base(tmp_path / "layers").named_parameters():
        assert torch.equal(parameter, scattered[name]), name


def test_short_reads_are_continued(tmp_path, monkeypatch):
    build_checkpoint(tmp_path)
    whole = dict(load_base(tmp_path).named_parameters())
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:1000]], at))
    for name, parameter in load_base(tmp_path).named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_the_bar_shows_tensors_bytes_and_rate_and_is_off_without_a_terminal(tmp_path, capfd):
    build_checkpoint(tmp_path)
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_dict(make_config()))
    load_weights(model, tmp_path)
    assert capfd.readouterr().err == ""
    report = load_weights(model, tmp_path, progress=True)
    shown = capfd.readouterr().err
    assert "B/s" in shown and f"/{report.tensors} tensors" in shown, shown


def test_a_trainable_parameter_stays_trainable(tmp_path):
    build_checkpoint(tmp_path)
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_dict(make_config()))
    load_weights(model, tmp_path)
    assert model.lm_head.weight.requires_grad
    assert not model.get_parameter(f"{LAYER}.experts.w1.packed").requires_grad


MEASURE = """
import sys
from k3tune.model import load_base

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak()
model = load_base(sys.argv[1])
local = sum(parameter.nbytes for parameter in model.parameters())
print(local, (peak() - before) / local)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_200_mb_peaks_at_most_15_percent_above_its_bytes(tmp_path):
    build_checkpoint(
        tmp_path,
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=5,
        num_attention_heads=8,
        kda_num_heads=8,
        kda_head_dim=64,
        num_experts=32,
        moe_intermediate_size=768,
        routed_expert_hidden_size=768,
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    local, ratio = done.stdout.split()
    print(f"local bytes {local}, peak ratio {ratio}")
    assert int(local) > 190e6
    assert float(ratio) <= 1.15
