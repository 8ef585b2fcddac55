"""Whatever an adapter is exported as, it comes back as it was trained, bit by bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3tune.errors import AdapterError
from k3tune.lora import attach_lora, export_adapter, import_adapter, load_adapter, save_adapter
from k3tune.model import load_base

SERVED = ("self_attn.o_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
SGLANG_TARGETS = (*SERVED, "self_attn.q_b_proj", "experts", "shared_experts", "dense")
MIXED = {
    "rank_pattern": {"o_proj": 5, "experts.w2": 3, r"layers\.2\..*w1": 1, "w3": 7},
    "alpha_pattern": {r"layers\.1\..*": 12, "w3": 2.5},
}
CASES = [
    ("peft", None),
    ("vllm", None),
    ("vllm", "per_expert"),
    ("sglang", None),
    ("sglang", "per_expert"),
]


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_adapter(actual, expected):
    """Same keys, dtypes, bits and config."""
    found, wanted = tensors_of(actual), tensors_of(expected)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key
    configs = [
        json.loads((path / "adapter_config.json").read_text()) for path in (actual, expected)
    ]
    assert configs[0] == configs[1]


@pytest.fixture(scope="module")
def served_base(folder):
    return load_base(folder, dtype=torch.float32, kernels="reference")


@pytest.fixture
def trained(folder, spec, randomise, tmp_path):
    """Save an adapter of random factors; arguments are the spec's and save_adapter's."""

    def save(dtype=torch.bfloat16, **fields):
        model = load_base(folder, dtype=torch.float32, kernels="reference")
        model = randomise(attach_lora(model, spec(**{"targets": SGLANG_TARGETS, **fields})))
        return save_adapter(model, tmp_path / "trained", dtype=dtype, version=3)

    return save


@pytest.mark.parametrize("source_form", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("rank", [1, 8, 64])
def test_every_format_and_form_comes_back_bit_by_bit(trained, tmp_path, source_form, rank):
    source = trained(form=source_form, rank=rank)
    for number, (consumer, form) in enumerate(CASES):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        export_adapter(source, out, format=consumer, form=form)
        import_adapter(out, back)
        assert_same_adapter(back, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("source_form", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_mixed_ranks_and_scales_come_back_bit_by_bit(trained, tmp_path, source_form, rslora, dtype):
    source = trained(form=source_form, use_rslora=rslora, dtype=dtype, **MIXED)
    for number, (consumer, form) in enumerate(CASES):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        export_adapter(source, out, format=consumer, form=form)
        import_adapter(out, back)
        assert_same_adapter(back, source)


@pytest.mark.parametrize(
    "fields",
    [
        {"targets": ["self_attn.o_proj", "experts", "shared_experts"], "layers": [1]},
        {"targets": ["experts.w1"], "layers": [2]},
        {"targets": ["experts.w2", "kv_a_proj_with_mqa"]},
        {"targets": ["attention", "latent", "experts"]},
    ],
    ids=["one layer", "w1 alone", "w2 and kv_a", "all that vLLM takes"],
)
@pytest.mark.parametrize("source_form", ["per_expert", "shared_outer"])
def test_subsets_of_layers_and_targets_come_back(folder, trained, tmp_path, source_form, fields):
    source = trained(form=source_form, **fields)
    cases = CASES[:3] if "latent" in fields.get("targets", ()) else CASES
    for number, (consumer, form) in enumerate(cases):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        export_adapter(source, out, format=consumer, form=form, base=folder)
        import_adapter(out, back, base=folder)
        assert_same_adapter(back, source)


def test_experts_of_their_own_ranks_come_back(folder, write_adapter, tmp_path):
    factors = {}
    for projection, (outputs, inputs) in {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}.items():
        for expert in (0, 1, 3):
            at = f"model.layers.1.block_sparse_moe.experts.{expert}.{projection}."
            factors[f"{at}lora_A.weight"] = torch.randn(expert + 1, inputs)
            factors[f"{at}lora_B.weight"] = torch.randn(outputs, expert + 1)
    source = tmp_path / "source"
    foreign = write_adapter(factors, alpha_pattern={r"experts\.3\.w1": 5})
    import_adapter(foreign, source, base=folder)
    for consumer in ("peft", "vllm", "sglang"):
        export_adapter(source, tmp_path / consumer, format=consumer, base=folder)
        import_adapter(tmp_path / consumer, tmp_path / f"{consumer}-back", base=folder)
        assert_same_adapter(tmp_path / f"{consumer}-back", source)


def test_what_was_dropped_is_said(trained, tmp_path):
    source = trained(targets=["experts", "latent"])
    export_adapter(source, tmp_path / "out", format="sglang", drop=["latent"])
    report = import_adapter(tmp_path / "out", tmp_path / "back")
    assert report.restored and len(report.dropped["latent"]) == 4
    assert not [key for key in tensors_of(tmp_path / "back") if "routed_expert" in key]


# ---- layouts of others ----


def expert_banks(rank, experts=5):
    """Matrices of two layers: module -> half -> [E, ...]."""
    sizes = {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}
    found = {}
    for layer in (1, 2):
        gate_A = torch.randn(experts, rank, 32)
        for projection, (outputs, inputs) in sizes.items():
            name = f"model.layers.{layer}.block_sparse_moe.experts.{projection}"
            A = gate_A if projection != "w2" else torch.randn(experts, rank, inputs)
            found[name] = {"A": A, "B": torch.randn(experts, outputs, rank)}
    return found


def peft_3d(banks, rank, inputs_first, gate_inside):
    """The two banks of each layer as PEFT flattens them: A expert-slowest, B expert-fastest."""
    files = {}
    for layer in (1, 2):
        stack = f"model.layers.{layer}.block_sparse_moe.experts"
        w1, w3, w2 = (banks[f"{stack}.{name}"] for name in ("w1", "w3", "w2"))
        fused = {
            "gate_up": (w1["A"], torch.cat([w1["B"], w3["B"]], dim=1)),
            "down": (w2["A"], w2["B"]),
        }
        for kind, (A, B) in fused.items():
            if not inputs_first:
                A, B = B.mT, A.mT
            inside = (kind == "gate_up") == gate_inside
            at = f"base_model.model.{stack}{'.base_layer' if inside else ''}"
            files[f"{at}.lora_A.weight"] = A.reshape(-1, A.shape[-1]).contiguous()
            flat = B.permute(1, 2, 0).reshape(B.shape[1], -1).contiguous()
            files[f"{at}.lora_B.weight"] = flat
            assert flat.shape[1] == rank * 5
    return files


@pytest.mark.parametrize("inputs_first", [True, False], ids=["new roles", "old roles"])
@pytest.mark.parametrize("gate_inside", [True, False], ids=["gate inside", "down inside"])
@pytest.mark.parametrize("with_base", [True, False], ids=["with base", "without"])
def test_peft_3d_banks_are_told_apart_by_their_shapes(
    folder, write_adapter, tmp_path, inputs_first, gate_inside, with_base
):
    banks = expert_banks(3)
    files = peft_3d(banks, 3, inputs_first, gate_inside)
    path = write_adapter(files, r=3, target_parameters=["experts.gate_up_proj"])
    import_adapter(path, tmp_path / "out", base=folder if with_base else None)
    found = tensors_of(tmp_path / "out")
    assert len(found) == 12
    for name, halves in banks.items():
        for half, value in halves.items():
            key = f"base_model.model.language_model.{name}.lora_{half}.weight"
            assert torch.equal(found[key], value), key


def test_one_bank_without_a_base_is_not_guessed(write_adapter, tmp_path):
    files = peft_3d(expert_banks(3), 3, True, True)
    gate_only = {key: value for key, value in files.items() if "base_layer" in key}
    path = write_adapter(gate_only, r=3)
    with pytest.raises(AdapterError, match="name the base"):
        import_adapter(path, tmp_path / "out")


@pytest.mark.parametrize("layout", ["per expert", "stacked", "stacked shared"])
def test_served_names_of_the_experts_are_read(folder, write_adapter, tmp_path, layout):
    leaves = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    files, expected = {}, {}
    for name, halves in expert_banks(2).items():
        stack, _, projection = name.rpartition(".")
        for half, value in halves.items():
            if layout == "stacked shared" and (half == "A") == (projection != "w2"):
                value = value[:1].contiguous()
            key = f"base_model.model.language_model.{name}.lora_{half}.weight"
            expected[key] = value
            tail = f"{leaves[projection]}.lora_{half}.weight"
            if layout == "per expert":
                files |= {f"{stack}.{e}.{tail}": m.clone() for e, m in enumerate(value)}
            else:
                files[f"{stack}.{tail}"] = value.clone()
    import_adapter(write_adapter(files), tmp_path / "out", base=folder)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_an_imported_adapter_is_loaded_and_is_the_same(served_base, fixtures, tmp_path, ids):
    base = fixtures / "k3_tiny"
    import_adapter(base / "adapter", tmp_path / "out", base=base)
    logits = []
    for path in (base / "adapter", tmp_path / "out"):
        model = load_adapter(load_base(base, dtype=torch.float32, kernels="reference"), path)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_a_form_can_be_asked_for(trained, tmp_path):
    source = trained(form="shared_outer")
    import_adapter(source, tmp_path / "own", form="per_expert")
    import_adapter(tmp_path / "own", tmp_path / "shared", form="shared_outer")
    assert_same_adapter(tmp_path / "shared", source)
    with pytest.raises(AdapterError, match=r"lora_A of expert 0 and of expert 1 differ \(first at"):
        changed = tensors_of(tmp_path / "own")
        key = next(key for key in changed if key.endswith("experts.w1.lora_A.weight"))
        changed[key][1, 0, 0] += 1
        save_file(changed, tmp_path / "own" / "adapter_model.safetensors")
        import_adapter(tmp_path / "own", tmp_path / "no", form="shared_outer")


def test_tensors_the_record_does_not_know_are_refused(trained, tmp_path):
    export_adapter(trained(), tmp_path / "out", format="peft")
    metadata = json.loads((tmp_path / "out" / "k3tune.json").read_text())
    del metadata["export"]["modules"]["model.layers.0.mlp.gate_proj"]
    (tmp_path / "out" / "k3tune.json").write_text(json.dumps(metadata))
    with pytest.raises(AdapterError, match=r"knows nothing of model\.layers\.0\.mlp\.gate_proj"):
        import_adapter(tmp_path / "out", tmp_path / "back")
