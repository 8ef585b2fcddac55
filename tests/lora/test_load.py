"""Loading: what the tensors say is done, what the config says otherwise is reported."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3tune.errors import AdapterError, CheckpointError
from k3tune.lora import adapter_state, attach_lora, load_adapter, save_adapter
from k3tune.model import load_base

Q = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_{}.weight"
W1 = "base_model.model.language_model.model.layers.1.block_sparse_moe.experts.{}w1.lora_{}.weight"


def q_proj(rank=2):
    return {Q.format("A"): torch.randn(rank, 48), Q.format("B"): torch.randn(32, rank)}


def test_a_loaded_adapter_is_not_trained_unless_asked(folder, base, spec, tmp_path, ids):
    path = save_adapter(attach_lora(base, spec()), tmp_path / "adapter")
    frozen = load_adapter(load_base(folder), path)
    with frozen.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    trained = load_adapter(load_base(folder), path, trainable=True)
    assert sum(parameter.requires_grad for parameter in trained.parameters()) == 70


def test_a_second_adapter_is_loaded_inactive(base, spec, randomise, tmp_path, ids):
    model = randomise(attach_lora(base, spec()))
    path = save_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    with torch.no_grad():
        expected = model(ids).logits
        randomise(model)
        other = model(ids).logits
        load_adapter(model, path, adapter_name="saved")
        assert torch.equal(model(ids).logits, other)
        assert all(p.requires_grad for n, p in model.named_parameters() if ".default." in n)
        model.set_adapter("saved")
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_a_process_takes_the_rows_of_its_experts(folder, base, spec, randomise, tmp_path, form):
    whole = randomise(attach_lora(base, spec(form=form)))
    path = save_adapter(whole, tmp_path / "adapter", dtype=torch.float32)
    part = load_adapter(load_base(folder, dtype=torch.float32, experts=[3, 1]), path)
    state = adapter_state(part)
    for key, value in adapter_state(whole).items():
        stacked = ".experts.w" in key and len(value) > 1
        assert torch.equal(state[key], value[[3, 1]] if stacked else value)


def test_a_process_takes_its_experts_of_files_with_one_entry_each(folder, write_adapter):
    tensors = {
        W1.format(f"{expert}.", half): torch.randn(shape)
        for expert in range(5)
        for half, shape in (("A", (2, 32)), ("B", (64, 2)))
    }
    part = load_adapter(load_base(folder, experts=[3, 1]), write_adapter(tensors))
    state = adapter_state(part)
    assert state.keys() == {W1.format(f"{e}.", half) for e in (1, 3) for half in "AB"}
    assert all(torch.equal(value, tensors[key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, r"say another rank .* of 1 modules: .*q_proj \(4, tensors 2\); the tensors'"),
        ({"rank_pattern": {"q_proj": 3}}, r"of 1 modules: .*q_proj \(3, tensors 2\)"),
        ({"target_modules": ["k_proj"]}, "names 2 modules without tensors.*layers.0.*k_proj"),
        ({"target_modules": ["k_proj"]}, "leaves out 1 modules that have tensors.*q_proj"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [1]}, "leaves out 1 modules"),
        ({"target_modules": "all-linear"}, "names 4[0-9] modules without tensors"),
        ({"alpha_pattern": {"v_proj": 3}}, "alpha_pattern names 'v_proj', which fits no module"),
    ],
)
def test_a_config_that_disagrees_is_reported(base, write_adapter, caplog, fields, message):
    model = load_adapter(base, write_adapter(q_proj(), **fields))
    assert len(adapter_state(model)) == 2
    assert [r.levelname for r in caplog.records if re.search(message, r.message)]


def test_the_tensors_rank_is_used_in_the_scale(base, write_adapter):
    load_adapter(base, write_adapter(q_proj(rank=3), r=8, lora_alpha=6))
    assert base.model.layers[0].self_attn.q_proj.scaling == {"default": 2.0}


def test_a_failed_load_leaves_other_adapters_alone(base, spec, ids, randomise, write_adapter):
    model = randomise(attach_lora(base, spec(targets=["latent"])))
    bad = q_proj() | {Q.format("B"): torch.full((32, 2), torch.inf)}
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(AdapterError, match="finite values, found 64 that are not"):
            load_adapter(model, write_adapter(bad), adapter_name="bad")
        assert torch.equal(model(ids).logits, expected)
    assert list(model.peft_config) == model.active_adapters == ["default"]
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 8


def test_metadata_that_disagrees_is_reported(folder, base, spec, tmp_path, caplog):
    path = save_adapter(attach_lora(base, spec(targets=["w1"])), tmp_path / "adapter")
    metadata = json.loads((path / "k3tune.json").read_text())
    (path / "k3tune.json").write_text(json.dumps(metadata | {"form": "shared_outer"}))
    load_adapter(load_base(folder), path)
    assert "form is shared_outer, the tensors are per_expert and decide" in caplog.text


def test_dropout_that_the_experts_lack_is_reported(base, write_adapter, caplog):
    w1 = {W1.format("", "A"): torch.randn(1, 2, 32), W1.format("", "B"): torch.randn(5, 64, 2)}
    load_adapter(base, write_adapter(w1, lora_dropout=0.1), trainable=True)
    assert "lora_dropout 0.1 applies to linear modules only" in caplog.text


def changed(name, value):
    return lambda tensors: tensors | {name: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed("base_model.model.model.layers.0.self_attn.q_prj.lora_A.weight", torch.ones(1)),
            r"1 of 3 keys match nothing in the base: .*q_prj.*; near names: .*q_proj",
        ),
        (changed("base_model.model.lm_head.lora_A.weight", torch.ones(1)), "no server applies one"),
        (changed("model.layers.0.self_attn.q_proj.lora_A", torch.ones(1)), "1 of 3 keys match"),
        (changed(W1.format("5.", "A"), torch.ones(2, 32)), r"\(the base has experts 0 to 4\)"),
        (changed(W1.format("0.", "A"), torch.ones(2, 32)), "found no .*experts.0.w1.lora_B.weight"),
        (
            lambda t: {Q.format("A"): t[Q.format("A")]},
            "q_proj: expected a lora_A and .*no .*lora_B",
        ),
        (changed(Q.format("A"), torch.ones(3, 48)), "expected one rank .*, found 2 and 3"),
        (changed(Q.format("A"), torch.ones(2, 40)), r"expected \(r, 48\), found \(2, 40\)"),
        (changed(Q.format("B"), torch.ones(2, 32)), r"expected \(32, r\), found \(2, 32\)"),
        (changed(Q.format("A"), torch.ones(1, 2, 48)), r"expected \(r, 48\), found \(1, 2, 48\)"),
        (changed(Q.format("A"), torch.ones(48)), r"expected \(r, 48\), found \(48,\)"),
        (changed(Q.format("A"), torch.ones(0, 48)), r"expected \(r, 48\), found \(0, 48\)"),
        (
            changed(W1.format("", "A"), torch.ones(4, 2, 32)),
            r"expected \(1 or 5, r, 32\) or \(r, 32\), found \(4, 2, 32\)",
        ),
        (
            changed(Q.format("A"), torch.full((2, 48), torch.nan)),
            "finite values, found 96 that are",
        ),
        (changed(Q.format("A"), torch.ones(2, 48).int()), "expected a dtype of BF16, .* found I32"),
        (
            changed("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(2, 48)),
            "and .* name the same factor",
        ),
        (lambda _: {}, "expected LoRA factors, found no tensor"),
        (
            lambda _: {
                W1.format("", "A"): torch.ones(5, 2, 32),
                W1.format("0.", "A"): torch.ones(2, 32),
                W1.format("", "B"): torch.ones(5, 64, 2),
            },
            "w1: lora_A is there both stacked and expert by expert",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(base, write_adapter, change, message):
    with pytest.raises(AdapterError, match=message):
        load_adapter(base, write_adapter(change(q_proj())))
    # and nothing was changed
    assert not any("lora" in name for name, _ in base.named_modules())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True, expected False: K3's layers compute plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*, expected None"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters is"),
        ({"r": 0}, "r is 0, expected a number above 0"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number above 0"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern\['q_proj'\] is '8', expected a number"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern names '\\(', which is no regular expression"),
    ],
)
def test_configs_that_are_not_plain_lora_are_refused(base, write_adapter, fields, message):
    with pytest.raises(AdapterError, match=message):
        load_adapter(base, write_adapter(q_proj(), **fields))


def test_directories_that_are_no_adapter_are_refused(base, write_adapter, tmp_path):
    with pytest.raises(AdapterError, match="nowhere is no directory, expected an adapter"):
        load_adapter(base, tmp_path / "nowhere")
    path = write_adapter(q_proj())
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        load_adapter(base, path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="found a pickle: loading one runs its code"):
        load_adapter(base, path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(
        AdapterError, match=r"expected adapter_model.safetensors or .* found adapter_c"
    ):
        load_adapter(base, path)
    (path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        load_adapter(base, path)


def test_an_index_that_disagrees_with_its_files_is_refused(base, spec, tmp_path):
    model = attach_lora(base, spec(targets=["latent"]))
    path = save_adapter(model, tmp_path / "adapter", shard_bytes=400)
    first, second, *_ = sorted(path.glob("adapter_model-*"))
    tensors = load_file(first)
    save_file({f"{key}x": value for key, value in tensors.items()}, first)
    with pytest.raises(AdapterError, match=r"expected .* in .*, found it .* files of two adapters"):
        load_adapter(model, path, adapter_name="second")
    save_file(tensors, first)
    second.unlink()
    with pytest.raises(AdapterError, match=f"names the file '{second.name}', which is not there"):
        load_adapter(model, path, adapter_name="second")
