"""Attaching: the right modules, ranks and starts; nothing changes until B does."""

import logging
import math
import warnings

import pytest
import torch

from k3tune.errors import AdapterError
from k3tune.lora import adapter_parameters, adapter_state, attach_lora, disable_adapter
from k3tune.lora.inject import adapter_layers
from k3tune.model import load_base

KDA = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "g_proj")
MOE = "block_sparse_moe"
GROUPS = {
    "attention": {
        *(f"{layer}.self_attn.{name}" for layer in (0, 1) for name in KDA),
        *(f"2.self_attn.{name}" for name in MLA),
    },
    "latent": {f"{n}.{MOE}.routed_expert_{way}_proj" for n in (1, 2) for way in ("down", "up")},
    "experts": {f"{n}.{MOE}.experts.{name}" for n in (1, 2) for name in ("w1", "w2", "w3")},
    "shared_experts": {
        f"{n}.{MOE}.shared_experts.{name}_proj" for n in (1, 2) for name in ("gate", "up", "down")
    },
    "dense": {f"0.mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def adapted(model) -> set[str]:
    return {name.removeprefix("model.layers.") for name in adapter_layers(model, "default")}


def test_no_library_warns_of_old_names(base, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = attach_lora(base, spec(targets=("dense",)))
        # as TRL does at every step
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert base.is_activation_checkpointing
        model.gradient_checkpointing_disable()
        assert not base.is_activation_checkpointing


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_its_modules(base, spec, group):
    model = attach_lora(base, spec(targets=(group,)))
    assert adapted(model) == GROUPS[group]
    assert list(adapter_parameters(model)) == [group]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"targets": ["f_a_proj"]}, {"0.self_attn.f_a_proj", "1.self_attn.f_a_proj"}),
        ({"targets": [r"layers\.[01]\..*\.o_proj"]}, {f"{n}.self_attn.o_proj" for n in (0, 1)}),
        (
            {"targets": ["language_model.model.layers.2.self_attn.q_a_proj"]},
            {"2.self_attn.q_a_proj"},
        ),
        ({"targets": ["experts.w2"], "layers": [2]}, {f"2.{MOE}.experts.w2"}),
        ({"targets": ["latent"], "layers": [1]}, {n for n in GROUPS["latent"] if n[0] == "1"}),
        (
            {"targets": ["latent", "1.self_attn.q_proj"]},
            GROUPS["latent"] | {"1.self_attn.q_proj"},
        ),
    ],
)
def test_patterns_and_layers_choose_modules(base, spec, fields, expected):
    assert adapted(attach_lora(base, spec(**fields))) == expected


def test_forms_decide_what_experts_share(base, folder, spec):
    shapes = {}
    for form in ("per_expert", "shared_outer"):
        model = attach_lora(load_base(folder), spec(targets=["experts"], layers=[1], form=form))
        shapes[form] = {
            name.split("experts.")[1]: tuple(factor.shape)
            for name, factor in adapter_parameters(model)["experts"].items()
        }
    a, b, c, d = (5, 2, 32), (5, 64, 2), (5, 2, 64), (5, 32, 2)
    assert shapes["per_expert"] == {
        **{"w1.lora_A": a, "w1.lora_B": b, "w3.lora_A": a, "w3.lora_B": b},
        **{"w2.lora_A": c, "w2.lora_B": d},
    }
    a, d = (1, 2, 32), (1, 32, 2)
    assert shapes["shared_outer"] == {
        **{"w1.lora_A": a, "w1.lora_B": b, "w3.lora_A": a, "w3.lora_B": b},
        **{"w2.lora_A": c, "w2.lora_B": d},
    }


def test_patterns_give_rank_and_alpha(base, spec):
    model = attach_lora(
        base,
        spec(
            rank_pattern={"o_proj": 5, "experts.w2": 3},
            alpha_pattern={r"layers\.1\..*": 12},
            use_rslora=True,
        ),
    )
    layers = adapter_layers(model, "default")
    assert layers["model.layers.0.self_attn.o_proj"].scaling["default"] == 6 / math.sqrt(5)
    assert layers["model.layers.1.self_attn.o_proj"].scaling["default"] == 12 / math.sqrt(5)
    assert layers["model.layers.2.self_attn.q_a_proj"].scaling["default"] == 6 / math.sqrt(2)
    w2 = layers[f"model.layers.1.{MOE}.experts.w2"]
    assert w2.lora_A["default"].weight.shape == (5, 3, 64)
    assert w2.factors.scaling == 12 / math.sqrt(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_with_b_zero_the_model_is_the_base(folder, spec, ids, dtype, form):
    base = load_base(folder, dtype=dtype)
    with torch.no_grad():
        expected = base(ids).logits
        model = attach_lora(base, spec(form=form, init="gaussian"))
        assert torch.equal(model(ids).logits, expected)


def test_nothing_but_factors_is_trained(base, spec, ids):
    model = attach_lora(base, spec())
    factors = {id(f) for group in adapter_parameters(model).values() for f in group.values()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == factors
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in factors), name
        assert parameter.dtype == torch.float32 or parameter.dtype == torch.uint8


@pytest.mark.parametrize(
    ("init", "spread"), [("kaiming", 48**-0.5 / math.sqrt(3)), ("gaussian", 1 / 64)]
)
def test_a_starts_as_peft_starts_it(base, spec, init, spread):
    model = attach_lora(base, spec(targets=["q_proj", "w1"], rank=64, init=init))
    groups = adapter_parameters(model)
    q_proj = groups["attention"]["model.layers.0.self_attn.q_proj.lora_A"]
    assert q_proj.std().item() == pytest.approx(spread, rel=0.05)
    w1 = groups["experts"][f"model.layers.1.{MOE}.experts.w1.lora_A"]
    spread *= (48 / 32) ** 0.5 if init == "kaiming" else 1
    for row in w1:
        assert row.std().item() == pytest.approx(spread, rel=0.05)
    assert not torch.equal(w1[0], w1[1])


def test_the_start_depends_on_the_seed_and_nothing_else(folder, spec):
    def start(**fields):
        torch.rand(3)
        return adapter_state(attach_lora(load_base(folder), spec(**fields)))

    first, again, other = start(), start(), start(seed=1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if "lora_A" in key)
    # a factor starts the same whatever else is adapted
    alone = start(targets=["w1"])
    assert all(torch.equal(first[key], value) for key, value in alone.items())


def test_counts_are_said(base, spec, caplog):
    with caplog.at_level(logging.INFO, "k3tune.lora"):
        attach_lora(base, spec(targets=["latent"]))
    # two layers of 48 -> 32 and 32 -> 48, rank 2
    assert "4 modules in 1 target groups, 640 trainable parameters" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"targets": ["latent", "atention"]},
            "'atention' matches no module; near names: attention",
        ),
        ({"targets": ["qproj"]}, "'qproj' matches no module; near names: q_proj"),
        ({"targets": ["dense"], "layers": [1, 2]}, "'dense' matches no module in layers 1, 2"),
        ({"targets": ["lm_head"]}, "fits only modules that cannot be adapted, such as lm_head"),
        ({"targets": ["gate"]}, "cannot be adapted, such as model.layers.1.*gate .Router"),
        ({"layers": [1, 3]}, "layer 3 is to be adapted, expected layers from 0 to 2: the base"),
        ({"rank_pattern": {"w4": 3}}, "pattern 'w4' matches no module; near names"),
        (
            {"targets": ["latent"], "alpha_pattern": {"q_proj": 3}},
            "pattern 'q_proj' matches no module",
        ),
        ({"targets": ["w1"], "dropout": 0.1}, "dropout is 0.1 and targets match .*w1"),
    ],
)
def test_what_does_not_fit_the_base_is_said(base, spec, fields, message):
    with pytest.raises(AdapterError, match=message):
        attach_lora(base, spec(**fields))
    assert not any("lora" in name for name, _ in base.named_modules())


def test_skipped_experts_cannot_be_adapted(folder, spec):
    base = load_base(folder, experts=[1, 3])
    with pytest.raises(AdapterError, match=r"2 of 5 experts a layer .*experts=None"):
        attach_lora(base, spec())
    attach_lora(base, spec(targets=["attention", "shared_experts"]))


def test_dropout_acts_in_training_only(base, spec, ids, randomise):
    model = randomise(attach_lora(base, spec(targets=["attention"], dropout=0.5)))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_disabled_it_is_the_base_and_enabled_again_it_is_not(base, spec, ids, randomise):
    with torch.no_grad():
        expected = base(ids).logits
        model = randomise(attach_lora(base, spec()))
        with disable_adapter(model):
            assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(model(ids).logits, expected)
    assert all(
        f.requires_grad for group in adapter_parameters(model).values() for f in group.values()
    )
