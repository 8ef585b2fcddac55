"""The model is K3: it reproduces the golden checkpoints, and a second implementation of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from independent_k3 import IndependentK3
from k3tune.model import K3ForCausalLM, load_base

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("k3_tiny", "k3_tiny_shared_outer")
LOGITS_ATOL = 3e-4


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> tuple[K3ForCausalLM, dict[str, torch.Tensor]]:
    folder = FIXTURES / request.param
    return load_base(folder, dtype=torch.float32), load_file(folder / "golden.safetensors")


@torch.no_grad()
def test_logits_and_loss_are_the_released_models(golden):
    model, expected = golden
    ids = expected["input_ids"]
    output = model(ids, labels=ids, return_logits=True)
    assert (output.logits - expected["logits"]).abs().max() <= LOGITS_ATOL
    assert (output.loss - expected["base_loss"]).abs() <= 1e-4


@torch.no_grad()
def test_router_chooses_the_released_models_experts_with_its_weights(golden):
    model, expected = golden
    ids = expected["input_ids"]
    routing = model(ids, output_routing=True).routing
    assert list(routing) == list(model.model.architecture.moe_layers)
    for layer, (experts, weights) in routing.items():
        for row in range(len(ids)):
            chosen, order = experts[row].sort(-1)
            golden_chosen, golden_order = expected[f"router.{layer}.experts.{row}"].sort(-1)
            assert torch.equal(chosen, golden_chosen.long())
            golden_weights = expected[f"router.{layer}.weights.{row}"].gather(-1, golden_order)
            assert (weights[row].gather(-1, order) - golden_weights).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 2, 9])
def test_prefill_then_decode_equals_the_full_pass(golden, prefill):
    model, expected = golden
    ids = expected["input_ids"]
    output = model(ids[:, :prefill], use_cache=True)
    logits = [output.logits]
    for t in range(prefill, ids.shape[1]):
        output = model(ids[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits)
    assert (torch.cat(logits, 1) - expected["logits"]).abs().max() <= LOGITS_ATOL


@torch.no_grad()
def test_a_prompt_may_be_prefilled_in_pieces(golden):
    model, expected = golden
    ids = expected["input_ids"]
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits, second.logits], 1)
    assert (logits - expected["logits"]).abs().max() <= LOGITS_ATOL


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_fp64_agrees_with_a_second_implementation(name):
    ids = load_file(FIXTURES / name / "golden.safetensors")["input_ids"][:1]
    expected = IndependentK3(FIXTURES / name).logits(ids[0].tolist())
    actual = load_base(FIXTURES / name, dtype=torch.float64)(ids).logits[0]
    assert (actual - expected).abs().max() <= 1e-11
