"""PEFT's own life cycle works on the adapted model, and what cannot work is refused."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from k3tune.errors import AdapterError
from k3tune.lora import (
    adapter_parameters,
    adapter_state,
    attach_lora,
    disable_adapter,
    load_adapter,
)
from k3tune.lora.layers import LoraLinear, LoraPackedProjection
from k3tune.model import load_base


@pytest.fixture
def logits(ids):
    def run(model):
        with torch.no_grad():
            return model(ids).logits

    return run


def test_two_adapters_take_turns(base, spec, randomise, logits):
    plain = logits(base)
    model = randomise(attach_lora(base, spec()))
    first = logits(model)
    # other modules, ranks and form than the first
    second_spec = spec(targets=["experts", "dense", "f_b_proj"], rank=3, form="shared_outer")
    assert attach_lora(model, second_spec, adapter_name="second") is model
    randomise(model, "second")
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    second = logits(model)
    assert not torch.equal(second, first) and not torch.equal(second, plain)
    assert adapter_state(model).keys() != adapter_state(model, "default").keys()
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(f) for g in adapter_parameters(model).values() for f in g.values()}
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with disable_adapter(model):
        assert torch.equal(logits(model), plain)


def test_a_deleted_adapter_is_gone(base, spec, randomise, logits):
    plain = logits(base)
    model = randomise(attach_lora(base, spec()))
    attach_lora(model, spec(targets=["latent"]), adapter_name="second")
    with pytest.warns(UserWarning, match="default was active which is now deleted"):
        model.delete_adapter("default")
    assert list(model.peft_config) == ["second"]
    model.set_adapter("second")
    assert torch.equal(logits(model), plain)
    with pytest.raises(AdapterError, match="no adapter 'default', it has second"):
        adapter_state(model, "default")


def test_unload_gives_the_base_back(base, spec, randomise, logits):
    plain, names = logits(base), [name for name, _ in base.named_parameters()]
    assert randomise(attach_lora(base, spec())).unload() is base
    assert [name for name, _ in base.named_parameters()] == names
    assert torch.equal(logits(base), plain)
    attach_lora(base, spec())


def test_trainable_parameters_are_printed(base, spec, capsys):
    model = attach_lora(base, spec(targets=["latent"]))
    model.print_trainable_parameters()
    assert "trainable params: 640 ||" in capsys.readouterr().out


def test_peft_can_add_an_adapter_to_wrapped_modules(base, spec, logits):
    model = attach_lora(base, spec(targets=["w1", "q_proj"]))
    first = logits(model)
    model.add_adapter(
        "second", LoraConfig(r=3, target_modules=["w1"], init_lora_weights="gaussian")
    )
    model.set_adapter("second")
    assert torch.equal(logits(model), first)
    [w1_A, w1_B, *_] = adapter_parameters(model)["experts"].values()
    assert w1_A.shape == (5, 3, 32) and w1_A.std() > 0.1 and not w1_B.any()


@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_what_pefts_own_save_writes_can_be_loaded(
    folder, base, spec, randomise, logits, tmp_path, form
):
    model = randomise(attach_lora(base, spec(form=form, rank_pattern={"w2": 3})))
    model.save_pretrained(tmp_path)
    again = load_adapter(load_base(folder, dtype=torch.float32, kernels="reference"), tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True, expected False: K3's layers compute plain LoRA"),
        ({"lora_bias": True}, "lora_bias is True, expected False"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora', expected true"),
    ],
)
def test_variants_of_lora_are_refused(base, spec, fields, message):
    model = attach_lora(base, spec(targets=["q_proj"]))
    with pytest.raises(AdapterError, match=message):
        model.add_adapter("second", LoraConfig(target_modules=["q_proj"], **fields))


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused_with_the_reason(base, spec, randomise, logits, how):
    model = randomise(attach_lora(base, spec()))
    before = logits(model)
    with pytest.raises(AdapterError, match=r"4 bits.*would lose most of it.*save_adapter"):
        getattr(model, how)()
    model.unmerge_adapter()
    assert torch.equal(logits(model), before)


def test_two_active_adapters_are_refused(base, spec):
    model = attach_lora(base, spec())
    attach_lora(model, spec(), adapter_name="second")
    with pytest.raises(AdapterError, match="default, second were to be active together"):
        model.base_model.set_adapter(["default", "second"])


def test_factors_stay_fp32_when_the_model_is_cast(base, spec, ids):
    model = attach_lora(base, spec()).bfloat16()
    factors = [f for group in adapter_parameters(model).values() for f in group.values()]
    assert {factor.dtype for factor in factors} == {torch.float32}
    model(ids, labels=ids).loss.backward()
    assert {factor.grad.dtype for factor in factors} == {torch.float32}


def test_autocast_changes_no_dtype_of_a_factors_gradient(base, spec, ids, randomise):
    model = randomise(attach_lora(base, spec()))
    with torch.no_grad():
        expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = model(ids, labels=ids, return_logits=True).to_tuple()[:2]
        loss.backward()
    assert (logits - expected).norm() < 0.2 * expected.norm()
    factors = [f for group in adapter_parameters(model).values() for f in group.values()]
    assert all(factor.grad.dtype == torch.float32 for factor in factors)


def test_the_layers_are_registered_with_peft(base, spec):
    model = attach_lora(base, spec())
    moe = base.model.layers[1].block_sparse_moe
    assert isinstance(moe.experts.w1, LoraPackedProjection)
    assert isinstance(moe.routed_expert_up_proj, LoraLinear)
    assert model.get_model_status().num_adapter_layers == 35
    assert {status.enabled for status in model.get_layer_status()} == {True}


def test_generation_goes_through_the_adapter(base, spec, ids, randomise):
    model = randomise(attach_lora(base, spec()))
    tokens = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        assert tokens[0, 13] == model(ids[:1]).logits[0, -1].argmax()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base, spec: attach_lora(torch.nn.Linear(2, 2), spec()), "found a Linear"),
        (lambda base, spec: adapter_state(base), "found a K3ForCausalLM without: use attach_lora"),
        (lambda base, spec: attach_lora(attach_lora(base, spec()), spec()), "'default' already"),
        (
            lambda base, spec: [attach_lora(base, spec()) for _ in range(2)],
            "wrapped by a PeftModel",
        ),
        (lambda base, spec: attach_lora(base, spec(), adapter_name="a.b"), "a name without dots"),
    ],
)
def test_misuse_is_said(base, spec, make, message):
    with pytest.raises(AdapterError, match=message):
        make(base, spec)


def test_layers_of_pefts_own_are_not_taken_for_k3tunes(base):
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    assert isinstance(model, PeftModel)
    with pytest.raises(AdapterError, match=r"q_proj is wrapped by PEFT's own Linear.*attach_lora"):
        adapter_state(model)
