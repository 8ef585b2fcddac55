"""The table of what engines take: data that says a reason wherever it says no."""

import re

import pytest

from k3tune.lora.export.capabilities import ENGINES, SGLANG, VLLM
from k3tune.lora.export.layout import target_of
from k3tune.lora.modules import module_shapes
from k3tune.lora.targets import adaptable_modules
from k3tune.model import load_base
from k3tune.model.latent_moe import PackedProjection
from k3tune.published.architecture import parse_config, read_config


@pytest.fixture(scope="module")
def shapes(folder):
    return module_shapes(parse_config(read_config(folder)))


def leaves(shapes, outcome, engine):
    """Last parts of the modules an engine treats so."""
    treated = (name for name in shapes if target_of(engine, name).outcome == outcome)
    return {name.rpartition(".")[2] for name in treated}


def test_modules_of_a_config_are_those_of_the_model(folder, shapes):
    model = load_base(folder)
    found = adaptable_modules(model)
    assert set(found) == set(shapes)
    for name, module in found.items():
        count = module.num_experts if isinstance(module, PackedProjection) else None
        assert shapes[name] == (module.in_features, module.out_features, count)


def test_vllm_takes_every_module_once_patched(shapes):
    assert leaves(shapes, "served", VLLM) == {name.rpartition(".")[2] for name in shapes}


def test_sglang_takes_attention_outputs_and_feed_forwards(shapes):
    assert leaves(shapes, "served", SGLANG) == {
        *("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"),
    }
    assert leaves(shapes, "dropped", SGLANG) == {"q_proj", "k_proj", "v_proj"}
    assert leaves(shapes, "misbound", SGLANG) == {"routed_expert_down_proj"}
    assert "routed_expert_up_proj" in leaves(shapes, "refused", SGLANG)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.label)
def test_every_refusal_and_fault_has_its_reason(engine):
    assert re.fullmatch(r"\d+(\.\d+)+", engine.version)
    for target in engine.targets:
        re.compile(target.pattern)
        assert (target.outcome == "served") == (target.reason == "")
    for fault in engine.faults:
        re.compile(fault.pattern)
        assert fault.what and fault.where
    assert all(group.why and len(group.names) > 1 for group in engine.together)


def test_an_unknown_module_is_refused():
    target = target_of(VLLM, "lm_head")
    assert target.outcome == "refused" and "not known" in target.reason
