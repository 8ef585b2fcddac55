"""Each consumer gets the layout it reads, or a reason; nothing is lost without a word."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from closeness import assert_close
from k3tune.errors import AdapterError
from k3tune.lora import attach_lora, export_adapter, save_adapter, shards
from k3tune.lora import read as reading
from k3tune.lora.export import stream
from k3tune.model import load_base

PREFIX = "base_model.model.language_model.model.layers."
EXPERTS = f"{PREFIX}1.block_sparse_moe.experts"


@pytest.fixture
def adapter(folder, spec, randomise, tmp_path):
    def save(form="per_expert", dtype=torch.bfloat16, name="trained", **fields):
        model = load_base(folder, dtype=torch.float32, kernels="reference")
        options = {"targets": ["o_proj", "experts", "shared_experts"], "form": form, **fields}
        model = randomise(attach_lora(model, spec(**options)))
        return save_adapter(model, tmp_path / name, dtype=dtype, version=3, provenance={"run": "x"})

    return save


def read(path, name="adapter_config.json"):
    return json.loads((path / name).read_text())


def tensors_of(path):
    return load_file(path / "adapter_model.safetensors")


# ---- layouts ----


@pytest.mark.parametrize("consumer", ["peft", "vllm", "sglang"])
def test_experts_by_2d_keys(adapter, tmp_path, consumer):
    source = adapter()
    report = export_adapter(source, tmp_path / "out", format=consumer)
    trained, found = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.form == "per_expert" and report.tensors == len(found)
    for expert in range(5):
        key = f"{EXPERTS}.{expert}.w2.lora_B.weight"
        assert torch.equal(found[key], trained[f"{EXPERTS}.w2.lora_B.weight"][expert])
    assert f"{EXPERTS}.w2.lora_B.weight" not in found


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_stacked_experts_with_shared_outer_factors(adapter, tmp_path, consumer):
    report = export_adapter(adapter("shared_outer"), tmp_path / "out", format=consumer)
    found = tensors_of(tmp_path / "out")
    assert found[f"{EXPERTS}.w1.lora_A.weight"].shape == (1, 2, 32)
    assert found[f"{EXPERTS}.w1.lora_B.weight"].shape == (5, 64, 2)
    assert found[f"{EXPERTS}.w2.lora_A.weight"].shape == (5, 2, 64)
    assert found[f"{EXPERTS}.w2.lora_B.weight"].shape == (1, 32, 2)
    flag = {"vllm": "--enable-moe-shared-loras", "sglang": "--experts-shared-outer-loras"}
    assert report.form == "shared_outer" and flag[consumer] in report.command


def test_shared_factors_are_repeated_exactly_and_it_is_said(adapter, tmp_path):
    source = adapter("shared_outer")
    report = export_adapter(source, tmp_path / "out", format="peft")
    shared = tensors_of(source)[f"{EXPERTS}.w1.lora_A.weight"][0]
    found = tensors_of(tmp_path / "out")
    assert all(torch.equal(found[f"{EXPERTS}.{e}.w1.lora_A.weight"], shared) for e in range(5))
    assert [change for change in report.changes if "repeated for every expert" in change]


def test_own_factors_are_stacked_only_when_equal(adapter, tmp_path):
    with pytest.raises(AdapterError, match=r"w1: lora_A of expert 0 and of expert 1 differ \(fir"):
        export_adapter(adapter(), tmp_path / "out", format="vllm", form="shared_outer")
    shared = adapter("shared_outer", name="shared")
    export_adapter(shared, tmp_path / "own", format="peft")
    export_adapter(tmp_path / "own", tmp_path / "out", format="vllm", form="shared_outer")
    expected, found = tensors_of(shared), tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_peft_has_no_stacked_form(adapter, tmp_path):
    with pytest.raises(AdapterError, match="form is shared_outer, expected per_expert for peft"):
        export_adapter(
            adapter("shared_outer"), tmp_path / "out", format="peft", form="shared_outer"
        )


def test_sglang_gets_names_by_their_last_part(adapter, tmp_path):
    report = export_adapter(adapter(), tmp_path / "out", format="sglang")
    targets = ["down_proj", "gate_proj", "o_proj", "up_proj"]
    assert read(tmp_path / "out")["target_modules"] == targets
    assert f"--lora-target-modules {' '.join(targets)} " in report.command
    assert "w1" in "".join(tensors_of(tmp_path / "out"))


def test_vllm_gets_one_file_and_sglang_shards(adapter, tmp_path):
    source = adapter()
    for consumer in ("vllm", "sglang", "peft"):
        export_adapter(source, tmp_path / consumer, format=consumer, shard_bytes=5_000)
    count = {path.parent.name for path in tmp_path.glob("*/*-00002-of-*.safetensors")}
    assert count == {"sglang", "peft"}
    index = read(tmp_path / "sglang", "adapter_model.safetensors.index.json")
    assert len(index["weight_map"]) == 78


def test_the_rank_flag_is_a_value_the_server_takes(adapter, tmp_path):
    for rank, flag in ((1, 1), (2, 8), (17, 32), (300, 320)):
        report = export_adapter(
            adapter(targets=["o_proj"], rank=rank, name=f"t{rank}"),
            tmp_path / f"out{rank}",
            format="vllm",
        )
        assert f"--max-lora-rank {flag} " in report.command
    with pytest.raises(AdapterError, match=r"rank is 513, expected at most 512: vllm 0\.33\.0"):
        export_adapter(adapter(targets=["o_proj"], rank=513), tmp_path / "out513", format="vllm")


# ---- what a consumer does not take ----


def test_targets_a_server_loses_are_refused_unless_dropped(adapter, tmp_path):
    source = adapter(targets=["attention", "latent", "experts"])
    with pytest.raises(AdapterError) as refusal:
        export_adapter(source, tmp_path / "out", format="sglang")
    message = str(refusal.value)
    assert "sglang 0.5.23 does not serve 10 of the adapter's targets" not in message
    for word in ("q_proj", "is dropped: KDA's", "is misbound", "is refused", "--drop q_proj,"):
        assert word in message
    names = message.rpartition("--drop ")[2].split(",")
    report = export_adapter(source, tmp_path / "out", format="sglang", drop=names)
    assert set(report.dropped) == set(names)
    assert not [key for key in tensors_of(tmp_path / "out") if "routed_expert" in key]
    assert "To patch first" in (tmp_path / "out" / "README.md").read_text()


def test_a_drop_that_fits_nothing_is_an_error(adapter, tmp_path):
    with pytest.raises(AdapterError, match="drop names 'qproj', which fits no module"):
        export_adapter(adapter(), tmp_path / "out", format="vllm", drop=["qproj"])


def test_no_release_serves_it_and_the_report_says_so(adapter, tmp_path):
    report = export_adapter(adapter(), tmp_path / "out", format="vllm")
    assert "does not serve this adapter as released" in report.verdict
    assert "no SupportsLoRA" in report.patches[0]
    assert report.command.startswith("VLLM_KIMI_K3_GEMM_AR=0 vllm serve")


def test_what_needs_no_patch_says_so(adapter, folder, tmp_path):
    source = adapter(targets=["q_b_proj"])
    report = export_adapter(source, tmp_path / "out", format="sglang", base=folder)
    assert report.verdict == "sglang 0.5.23 loads this adapter as released"


def test_what_a_server_needs_is_written_as_zeros_and_said(adapter, folder, tmp_path):
    source = adapter(targets=["experts.w1", "kv_a_proj_with_mqa", "up_proj"])
    report = export_adapter(source, tmp_path / "out", format="sglang", base=folder)
    found = tensors_of(tmp_path / "out")
    layer = "model.layers.2.block_sparse_moe"
    assert set(report.zeros) >= {f"{layer}.experts.w2", "model.layers.2.self_attn.q_a_proj"}
    assert found[f"{PREFIX}2.self_attn.q_a_proj.lora_B.weight"].shape == (40, 2)
    for name in report.zeros:
        keys = [key for key in found if name.rpartition(".")[0] in key and key.endswith("B.weight")]
        assert keys
    assert not found[f"{EXPERTS}.3.w2.lora_B.weight"].any()
    # without the base nothing tells how wide q_a is
    with pytest.raises(AdapterError, match=r"q_a_proj must be written .* name the base"):
        config = read(source, "k3tune.json")
        config["base"]["name"] = None
        (source / "k3tune.json").write_text(json.dumps(config))
        export_adapter(source, tmp_path / "no", format="sglang")


def test_missing_experts_are_zeros_where_a_server_needs_them(folder, write_adapter, tmp_path):
    factors = {}
    for projection, (outputs, inputs) in {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}.items():
        for expert in (0, 3):
            at = f"model.layers.1.block_sparse_moe.experts.{expert}.{projection}."
            factors[f"{at}lora_A.weight"] = torch.randn(expert + 1, inputs)
            factors[f"{at}lora_B.weight"] = torch.randn(outputs, expert + 1)
    source = write_adapter(factors)
    peft = export_adapter(source, tmp_path / "peft", format="peft", base=folder)
    assert peft.tensors == 12 and not peft.zeros
    vllm = export_adapter(source, tmp_path / "vllm", format="vllm", base=folder)
    found = tensors_of(tmp_path / "vllm")
    assert vllm.tensors == 30 and len(vllm.zeros) == 9
    # one rank for a layer's experts
    assert {found[key].shape[0] for key in found if "lora_A" in key} == {4}
    assert [change for change in vllm.changes if change.startswith("ranks of 3 modules padded")]


# ---- scale and rank ----


def update_of(path, module):
    config, tensors = read(path), tensors_of(path)
    A, B = (tensors[f"{PREFIX}{module}.lora_{half}.weight"].double() for half in "AB")
    return config["lora_alpha"] / config["r"] * B @ A


@pytest.mark.parametrize("rslora", [False, True])
def test_sglang_reads_one_scale_so_the_others_are_folded(adapter, tmp_path, rslora):
    source = adapter(
        targets=["o_proj", "shared_experts.gate_proj"],
        alpha_pattern={"gate_proj": 5},
        rank_pattern={"gate_proj": 3},
        use_rslora=rslora,
    )
    report = export_adapter(source, tmp_path / "out", format="sglang")
    config = read(tmp_path / "out")
    assert config["r"] == 3 and not config["use_rslora"]
    assert not config["rank_pattern"] and not config["alpha_pattern"]
    trained = tensors_of(source)
    for module, alpha, rank in (
        ("1.self_attn.o_proj", 6, 2),
        ("1.block_sparse_moe.shared_experts.gate_proj", 5, 3),
    ):
        A, B = (trained[f"{PREFIX}{module}.lora_{half}.weight"].double() for half in "AB")
        expected = alpha / (rank**0.5 if rslora else rank) * B @ A
        assert_close(
            module, update_of(tmp_path / "out", module), expected, max_rel=1e-6, rms_rel=1e-7
        )
    said = " ".join(report.changes)
    assert "padded" in said and "folded into their factors" in said
    assert ("rsLoRA folded" in said) == rslora
    # a product that bf16 cannot hold is kept whole
    gate = f"{PREFIX}1.block_sparse_moe.shared_experts.gate_proj.lora_B.weight"
    assert tensors_of(tmp_path / "out")[gate].dtype == torch.float32


def test_peft_and_vllm_keep_ranks_and_scales_as_they_are(adapter, tmp_path):
    source = adapter(
        rank_pattern={"o_proj": 5, "experts.w2": 3}, alpha_pattern={"w3": 2.5}, use_rslora=True
    )
    for consumer in ("peft", "vllm"):
        report = export_adapter(source, tmp_path / consumer, format=consumer)
        config = read(tmp_path / consumer)
        assert not report.changes and config["use_rslora"]
        assert config["rank_pattern"] == {"o_proj": 5, "w2": 3}
        assert config["alpha_pattern"] == {"w3": 2.5}


def test_peft_finds_patterns_and_layers_of_experts_by_its_own_rules(adapter, tmp_path):
    """A subset of layers, and a projection of one layer with a rank of its own."""
    from peft.utils.other import get_pattern_key

    source = adapter(targets=["experts"], rank_pattern={r"layers\.2\..*w1": 4})
    export_adapter(source, tmp_path / "out", format="peft")
    config = read(tmp_path / "out")
    for layer, rank in ((1, 2), (2, 4)):
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.3.w1"
        key = get_pattern_key(config["rank_pattern"], name)
        assert config["rank_pattern"].get(key, config["r"]) == rank
    one = adapter(targets=["experts"], layers=[2], name="one")
    export_adapter(one, tmp_path / "one-out", format="peft")
    config = read(tmp_path / "one-out")
    assert (config["layers_to_transform"], config["layers_pattern"]) == ([2], "layers")


# ---- the directory ----


def test_beside_the_tensors(adapter, folder, tmp_path):
    report = export_adapter(adapter(), tmp_path / "out", format="vllm", base=folder, name="k3-v3")
    assert sorted(os.listdir(tmp_path / "out")) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "k3tune.json",
        "tensors.sha256",
    ]
    assert_digests_hold(tmp_path / "out")
    metadata = read(tmp_path / "out", "k3tune.json")
    trained = read(tmp_path / "trained", "k3tune.json")
    assert metadata["version"] == 3 and metadata["provenance"] == {"run": "x"}
    assert metadata["base"]["fingerprint"] == trained["base"]["fingerprint"]
    assert metadata["base"]["sample"].startswith("sample:sha256:")
    card = (tmp_path / "out" / "README.md").read_text()
    assert report.command in card and "k3-v3=" in report.command


def assert_digests_hold(folder):
    lines = (folder / "tensors.sha256").read_text().splitlines()
    digests = dict(reversed(line.split("  ")) for line in lines)
    for key, value in tensors_of(folder).items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        assert digests[key] == hashlib.sha256(raw).hexdigest()


def test_chunks_that_are_used_again_are_written_and_hashed_first(adapter, tmp_path, monkeypatch):
    source = adapter()
    made, allocate = [], torch.UntypedStorage
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_CHUNK_BYTES", 48)
        patch.setattr(stream, "_BATCH_BYTES", 100)
        patch.setattr(shards, "_WRITEBACK_BYTES", 1000)
        patch.setattr(torch, "UntypedStorage", lambda size: made.append(size) or allocate(size))
        report = export_adapter(source, tmp_path / "out", format="peft")
    assert 0 < len(made) < report.size_bytes / 48 / 20
    assert_digests_hold(tmp_path / "out")
    trained, found = tensors_of(source), tensors_of(tmp_path / "out")
    for side in ("w1.lora_A", "w1.lora_B", "w3.lora_A", "w3.lora_B", "w2.lora_A", "w2.lora_B"):
        for expert in range(5):
            key = f"{EXPERTS}.{expert}.{side}.weight"
            assert torch.equal(found[key], trained[f"{EXPERTS}.{side}.weight"][expert])


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(adapter, tmp_path):
    source = adapter()
    export_adapter(source, tmp_path / "out", format="peft")
    with pytest.raises(AdapterError, match=r"out exists: .*overwrite=True"):
        export_adapter(source, tmp_path / "out", format="vllm")
    export_adapter(source, tmp_path / "out", format="vllm", overwrite=True)
    broken = tensors_of(source)
    broken[f"{EXPERTS}.w1.lora_B.weight"][4, 3, 1] = torch.inf
    save_file(broken, source / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"w1\.lora_B\.weight: expected finite values"):
        export_adapter(source, tmp_path / "new", format="peft")
    assert sorted(os.listdir(tmp_path)) == ["out", "trained"]


def test_a_training_checkpoint_is_a_source(adapter, tmp_path):
    adapter(name="checkpoint-7/adapter")
    report = export_adapter(tmp_path / "checkpoint-7", tmp_path / "out", format="vllm")
    assert report.tensors == 78


def test_nothing_heavy_is_loaded_and_little_memory_taken(adapter, tmp_path, repository):
    """An export is copying: neither the model, nor transformers, nor PEFT."""
    code = (
        "import sys; sys.path[:0] = ['.', 'kernels']\n"
        "from k3tune.lora import export_adapter\n"
        "export_adapter(sys.argv[1], sys.argv[2], format='vllm')\n"
        "print([name for name in ('transformers', 'peft', 'triton') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(adapter()), str(tmp_path / "out")]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---- merging ----


def test_merging_is_refused_with_what_it_would_lose(adapter, folder):
    from k3tune.lora.export.merging import refuse_merge

    message = str(refuse_merge(adapter(), folder))
    assert "merging is refused" in message
    assert "measured on 24 of its 30 expert matrices" in message and "% of the update" in message
    alone = adapter(targets=["o_proj"], name="attention")
    assert "leaves the experts alone" in str(refuse_merge(alone, folder))


def test_a_merge_is_measured_in_the_answers_too_and_leaves_the_files_alone(
    adapter, folder, ids, randomise
):
    from k3tune.lora import load_adapter
    from k3tune.lora.export.factors import open_source
    from k3tune.lora.export.merging import measure_merge, merge_into
    from k3tune.lora.read import FactorReader

    source = adapter(targets=["experts"])
    before = {file: file.read_bytes() for file in folder.iterdir()}
    model = load_adapter(load_base(folder, dtype=torch.float32, kernels="reference"), source)
    with torch.no_grad():
        adapted = model(ids).logits
        with FactorReader() as reader:
            trained = open_source(source, folder, reader)
            loss = measure_merge(trained, folder, None)
            merge_into(model, trained)
        merged = model(ids).logits
    assert loss.experts == loss.total == 30
    assert 0 < loss.error and 0 < loss.unchanged < 1
    assert not torch.equal(merged, adapted)
    assert before == {file: file.read_bytes() for file in folder.iterdir()}
