"""Every planted fault is caught, and named."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3tune.errors import K3TuneError
from k3tune.lora import attach_lora, export_adapter, import_adapter, save_adapter, verify
from k3tune.model import load_base

PREFIX = "base_model.model.language_model.model.layers."
EXPERTS = f"{PREFIX}1.block_sparse_moe.experts"
TARGETS = ("self_attn.o_proj", "experts", "shared_experts", "self_attn.q_proj")


@pytest.fixture
def adapter(folder, spec, randomise, tmp_path, copied):
    """Train (as it were) and save an adapter; its directory is ``tmp_path / "trained"``."""

    def save(form="per_expert", version=3, dtype=torch.bfloat16, **fields):
        def train(out):
            base = load_base(folder, dtype=torch.float32, kernels="reference")
            model = attach_lora(
                base, spec(**{"targets": TARGETS, "form": form, "rank": 4, **fields})
            )
            if version:
                randomise(model)
            save_adapter(model, out, dtype=dtype, version=version)

        key = {"form": form, "version": version, "dtype": dtype, **fields}
        return copied(train, tmp_path / "trained", **key)

    return save


@pytest.fixture
def exported(adapter, folder, tmp_path, copied):
    """The directory of an export."""

    def export(consumer="vllm", form=None, source_form="per_expert", drop=(), **fields):
        source = adapter(source_form, **fields)
        options = {"format": consumer, "form": form, "drop": drop}
        return copied(
            lambda out: export_adapter(source, out, base=folder, **options),
            tmp_path / "out",
            source_form=source_form,
            **options,
            **fields,
        )

    return export


@pytest.fixture
def check(folder, tmp_path):
    """Verify ``tmp_path / "out"`` against what was trained."""

    def run(against="trained", **options):
        source = None if against is None else tmp_path / against
        path = options.pop("path", tmp_path / "out")
        base = options.pop("base", folder)
        return verify(path, base, against=source, kernels="reference", **options)

    return run


def names(verification):
    return {fault.name for fault in verification.faults}


def edit(path, change):
    """Let ``change`` alter the tensors of a directory."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, file)


def edit_json(path, name, change):
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))


def pair(module):
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


# ---- nothing wrong ----


@pytest.mark.parametrize("source_form", ["per_expert", "shared_outer"])
@pytest.mark.parametrize(
    ("consumer", "form", "drop"),
    [
        ("peft", None, ()),
        ("vllm", None, ()),
        ("vllm", "per_expert", ()),
        ("sglang", None, ("q_proj",)),
        ("sglang", "per_expert", ("q_proj",)),
    ],
)
def test_a_good_export_is_proved(exported, check, source_form, consumer, form, drop):
    mixed = {"rank_pattern": {"o_proj": 2, "w2": 3}, "alpha_pattern": {"w3": 5}, "use_rslora": True}
    exported(consumer, form, source_form, drop, **mixed)
    found = check()
    assert found.ok, found.faults
    assert found.figures["forward_effect"] > 0.01 and found.figures["forward_gap"] < 1e-5
    assert not found.skipped


def test_what_was_rounded_to_bf16_is_still_the_same_adapter(adapter, folder, tmp_path, check):
    source = adapter(dtype=torch.float32)
    export_adapter(source, tmp_path / "out", format="vllm", base=folder, dtype="bfloat16")
    found = check()
    assert found.ok, found.faults
    assert 1e-5 < found.figures["forward_gap"] < 1e-2


def test_an_adapter_as_trained_is_verified_too(adapter, check, tmp_path):
    found = check(path=adapter())
    assert found.ok, found.faults
    assert any("fingerprint of all its parameters" in line for line in found.checks)


def test_an_import_is_verified(exported, check, tmp_path, folder):
    import_adapter(exported("sglang", drop=["q_proj"]), tmp_path / "back", base=folder)
    found = check(path=tmp_path / "back", against="back")
    assert found.ok, found.faults


def test_without_the_trained_adapter_it_says_what_was_not_checked(exported, check):
    exported()
    found = check(against=None)
    assert found.ok and found.skipped == ["factors against the trained ones: no --against"]


# ---- planted faults ----


def swap_halves(tensors):
    A, B = pair(f"{PREFIX}0.self_attn.o_proj")
    tensors[A], tensors[B] = tensors[B], tensors[A]


def transpose_halves(tensors):
    A, B = pair(f"{PREFIX}0.self_attn.o_proj")
    tensors[A], tensors[B] = tensors[B].T, tensors[A].T


def rotate_experts(tensors):
    for projection in ("w1", "w3", "w2"):
        for half in "AB":
            keys = [f"{EXPERTS}.{e}.{projection}.lora_{half}.weight" for e in range(5)]
            values = [tensors[key] for key in keys]
            tensors.update(zip(keys, values[1:] + values[:1], strict=True))


def rotate_one_half(tensors):
    keys = [f"{EXPERTS}.{e}.w2.lora_B.weight" for e in range(5)]
    values = [tensors[key] for key in keys]
    tensors.update(zip(keys, values[2:] + values[:2], strict=True))


def swap_gate_and_up(tensors):
    for key in [key for key in tensors if ".w1." in key]:
        other = key.replace(".w1.", ".w3.")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def swap_shared_gate_and_up(tensors):
    for key in [key for key in tensors if "gate_proj" in key]:
        other = key.replace("gate_proj", "up_proj")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def expert_slowest_B(tensors):
    """B of PEFT's flat form, taken apart as if experts were slowest."""
    keys = [f"{EXPERTS}.{e}.w2.lora_B.weight" for e in range(5)]
    flat = torch.stack([tensors[key] for key in keys]).permute(1, 2, 0).flatten(1)
    tensors.update(zip(keys, flat.view(-1, 5, 4).permute(1, 0, 2), strict=True))


def rank_slowest_A(tensors):
    keys = [f"{EXPERTS}.{e}.w1.lora_A.weight" for e in range(5)]
    flat = torch.stack([tensors[key] for key in keys]).flatten(0, 1)
    tensors.update(zip(keys, flat.view(4, 5, -1).transpose(0, 1), strict=True))


def drop_layer(tensors):
    for key in [key for key in tensors if key.startswith(f"{PREFIX}2.")]:
        del tensors[key]


def misspell(tensors):
    key = pair(f"{PREFIX}1.self_attn.o_proj")[0]
    tensors[key.replace("o_proj", "o_porj")] = tensors.pop(key)


def truncate_factor(tensors):
    key = pair(f"{PREFIX}1.self_attn.o_proj")[1]
    tensors[key] = tensors[key][:-3]


def drop_a_rank(tensors):
    key = pair(f"{EXPERTS}.3.w2")[0]
    tensors[key] = tensors[key][:-1]


def plant_nan(tensors):
    tensors[f"{EXPERTS}.2.w3.lora_B.weight"][5, 1] = torch.nan


def lose_one_factor(tensors):
    del tensors[f"{EXPERTS}.2.w3.lora_B.weight"]


def times_scale(tensors):
    for key in tensors:
        if key.endswith("lora_B.weight"):
            tensors[key] = tensors[key].float().mul(1.5)


def double_one(tensors):
    key = pair(f"{PREFIX}1.self_attn.o_proj")[1]
    tensors[key] = tensors[key] * 2


def change_one_value(tensors):
    tensors[f"{EXPERTS}.2.w1.lora_A.weight"][1, 7] *= 1.01


def zero_one_expert(tensors):
    tensors[f"{EXPERTS}.2.w1.lora_B.weight"].zero_()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (swap_halves, "A and B swapped"),
        (transpose_halves, "A and B swapped"),
        (rotate_experts, "expert order rotated"),
        (rotate_one_half, "expert order rotated"),
        (expert_slowest_B, "rank-fastest against expert-fastest"),
        (rank_slowest_A, "rank-fastest against expert-fastest"),
        (swap_gate_and_up, "gate and up swapped"),
        (swap_shared_gate_and_up, "gate and up swapped"),
        (times_scale, "alpha applied twice"),
        (drop_layer, "layer missing"),
        (misspell, "key misspelt"),
        (truncate_factor, "factor truncated"),
        (drop_a_rank, "factor truncated"),
        (plant_nan, "not finite"),
        (lose_one_factor, "factor missing"),
        (double_one, "wrong scale"),
        (zero_one_expert, "factor differs"),
        (change_one_value, "factor differs"),
    ],
)
@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "without hashes"])
def test_a_planted_fault_is_named(exported, check, change, name, hashed):
    out = exported()
    edit(out, change)
    if not hashed:
        (out / "tensors.sha256").unlink()
    found = check()
    assert name in names(found), found.faults
    assert not hashed or names(found) & {"tensor changed", "factor missing", "key misspelt"}


@pytest.mark.parametrize("change", [rotate_experts, swap_gate_and_up, plant_nan, drop_layer])
def test_a_change_after_the_export_is_found_without_the_trained_adapter(exported, check, change):
    edit(exported(), change)
    assert names(check(against=None)) & {"tensor changed", "layer missing"}


def test_a_square_factor_swapped_transposed_is_told_by_its_values(fixtures, tmp_path):
    # all experts' projections are 64 x 64 here
    base = fixtures / "k3_tiny"
    export_adapter(base / "adapter", tmp_path / "out", format="peft", base=base)

    def swap(tensors):
        for expert in range(16):
            A, B = pair(f"{EXPERTS}.{expert}.w2")
            tensors[A], tensors[B] = tensors[B].T, tensors[A].T

    edit(tmp_path / "out", swap)
    found = verify(tmp_path / "out", base, against=base / "adapter", kernels="reference")
    assert "A and B swapped" in names(found)
    assert "forward differs" in names(found)


def test_alpha_never_applied(exported, check):
    out = exported()
    # scale 1 instead of 6 / 4
    edit_json(out, "adapter_config.json", lambda config: config.update(lora_alpha=4))
    assert names(check()) == {"alpha never applied", "forward differs"}


def test_a_shared_factor_repeated_for_every_expert(exported, check):
    out = exported(source_form="shared_outer")

    def repeat(tensors):
        key = f"{EXPERTS}.w1.lora_A.weight"
        tensors[key] = tensors[key].repeat(5, 1, 1)

    edit(out, repeat)
    (out / "tensors.sha256").unlink()
    assert "shared factor repeated" in names(check(against=None))


def test_stacked_factors_of_single_experts_are_not_what_a_server_reads(exported, check):
    out = exported(source_form="shared_outer")

    def differ(tensors):
        key = f"{EXPERTS}.w2.lora_B.weight"
        tensors[key] = torch.randn(5, *tensors[key].shape[1:])

    edit(out, differ)
    assert "wrong shape" in names(check())


def test_a_truncated_file(exported, check):
    file = exported() / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert names(check()) == {"file truncated"}


def test_another_base_is_told_by_its_weights(exported, check, tmp_path, adapter):
    from checkpoints import build_checkpoint

    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_experts": 5, "vocab_size": 96}
    other = build_checkpoint(tmp_path / "other", seed=1, moe_intermediate_size=64, **sizes)
    exported()
    assert names(check(base=other)) == {"wrong base"}
    # what training saved remembers a hash of all parameters
    assert names(check(base=other, path=tmp_path / "trained")) == {"wrong base"}


def test_a_stale_version(exported, check):
    exported(version=3)
    assert check(expect_version=3).ok
    assert names(check(expect_version=4)) == {"stale version"}


def test_an_adapter_without_effect_is_right_at_version_0_only(exported, check):
    out = exported(version=0)
    assert check().ok
    edit_json(out, "k3tune.json", lambda metadata: metadata.update(version=1))
    assert names(check()) == {"all B zero"}


def test_what_an_engine_would_lose_is_named(adapter, folder, tmp_path, check):
    """Files written for another engine, by whatever tool, are read by the rules of this one."""
    export_adapter(adapter(), tmp_path / "out", format="vllm", base=folder)

    def claim(metadata):
        metadata["export"]["format"] = "sglang"

    edit_json(tmp_path / "out", "k3tune.json", claim)
    edit_json(
        tmp_path / "out",
        "adapter_config.json",
        lambda config: config.update(target_modules=["q_proj", "o_proj", "gate_proj", "up_proj"]),
    )
    found = check()
    assert names(found) == {"dropped by the engine", "refused by the engine"}
    lost = " ".join(str(fault) for fault in found.faults)
    assert "KDA's q, k and v" in lost and "down_proj is not in target_modules" in lost


def test_the_base_is_unchanged_or_named(exported, check, folder, tmp_path):
    exported()
    hashes = tmp_path / "base.sha256"
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}"
        for file in sorted(folder.iterdir())
    ]
    hashes.write_text("\n".join(lines) + "\n")
    assert check(base_unchanged=hashes).ok
    hashes.write_text("\n".join([f"{'0' * 64}  config.json", *lines[1:]]))
    [fault] = check(base_unchanged=hashes).faults
    assert (fault.name, fault.where) == ("base changed", "config.json")
    hashes.write_text("config.json\n")
    with pytest.raises(K3TuneError, match="make it with sha256sum in the base's folder"):
        check(base_unchanged=hashes)


def test_the_report_is_json(exported, check):
    exported()
    found = json.loads(check(expect_version=9).to_json())
    assert not found["ok"] and found["faults"][0]["name"] == "stale version"
    assert found["faults"][0].keys() == {"name", "where", "detail"}
