"""Precision belongs to the model: F32 stays F32, casts and autocast do not reach the islands."""

import pytest
import torch
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.model import load_base
from k3tune.model.kda import KimiDeltaAttention
from k3tune.model.latent_moe import LatentMoE
from k3tune.model.layers import SituMLP
from k3tune.model.mla import GatedMLA

FLOAT32_NAMES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
BLOCKS = (KimiDeltaAttention, GatedMLA, LatentMoE, SituMLP)
NAMES = ("k3_tiny", "k3_tiny_shared_outer")


def snapshot(model, *, uint8_or_float32: bool) -> dict[str, torch.Tensor]:
    kept = (torch.uint8, torch.float32) if uint8_or_float32 else (torch.bfloat16,)
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype in kept}


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.float16),
        lambda m: m.bfloat16(),
        lambda m: m.half().float().to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float64),
        lambda m: m.type(torch.bfloat16),
    ],
    ids=["to", "bfloat16", "chain", "float64", "type"],
)
def test_casts_leave_f32_and_packed_tensors_alone(fixtures, cast):
    model = load_base(fixtures / "k3_tiny")
    before = snapshot(model, uint8_or_float32=True)
    assert {n for n in before if n.endswith(FLOAT32_NAMES)} == {
        n for n, p in before.items() if p.dtype == torch.float32
    }
    after = dict(cast(model).named_parameters())
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_each_bf16_block_is_within_one_percent_of_its_fp32_output(fixtures, name):
    exact = load_base(fixtures / name, dtype=torch.float32)
    rounded = dict(load_base(fixtures / name).named_modules())
    ids = load_file(fixtures / name / "golden.safetensors")["input_ids"]
    errors: dict[str, float] = {}

    def compare(path: str):
        def hook(module, arguments, output):
            block, (x, *rest) = rounded[path], arguments
            expected = output[0] if isinstance(output, tuple) else output
            if isinstance(module, LatentMoE):
                rest = [output[1].expert_ids]
            actual = block(x.bfloat16(), *rest)
            actual = actual[0] if isinstance(actual, tuple) else actual
            errors[path] = relative_l2(actual, expected)

        return hook

    for path, module in exact.named_modules():
        if isinstance(module, BLOCKS) and not path.endswith("shared_experts"):
            module.register_forward_hook(compare(path))
    exact(ids, use_cache=False)
    layers = exact.model.architecture.num_hidden_layers
    assert len(errors) == 2 * layers
    print({path: f"{error:.1e}" for path, error in errors.items()})
    assert max(errors.values()) <= 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_bf16_model_with_replayed_experts_is_close(fixtures, name):
    ids = load_file(fixtures / name / "golden.safetensors")["input_ids"]
    exact = load_base(fixtures / name, dtype=torch.float32)
    rounded = load_base(fixtures / name)
    expected = exact(ids, labels=ids, return_logits=True, output_routing=True)
    replayed = rounded(ids, labels=ids, return_logits=True, routing=expected.routing)
    free = rounded(ids, output_routing=True).routing
    flips = sum(
        (free[layer].expert_ids.sort(-1).values != entry.expert_ids.sort(-1).values)
        .any(-1)
        .sum()
        .item()
        for layer, entry in expected.routing.items()
    )
    error = relative_l2(replayed.logits, expected.logits)
    print(f"relL2 {error:.3f}, loss {replayed.loss - expected.loss:.1e}, routing flips {flips}")
    assert error <= 0.12
    assert (replayed.loss - expected.loss).abs() <= 1e-2


@torch.no_grad()
def test_autocast_does_not_reach_the_f32_islands(fixtures):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float32)
    ids = load_file(fixtures / "k3_tiny" / "golden.safetensors")["input_ids"]
    seen: dict[str, torch.dtype] = {}

    def note(module, arguments, output):
        seen["router"] = output.expert_weights.dtype

    model.model.layers[1].block_sparse_moe.gate.register_forward_hook(note)
    exact = model(ids, output_routing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, labels=ids, return_logits=True, routing=exact.routing)
        gate = model.model.layers[1].block_sparse_moe.gate
        x = torch.randn(2, 5, model.model.architecture.hidden_size)
        inside = gate(x)
    assert seen["router"] == torch.float32
    assert torch.equal(inside.expert_weights, gate(x).expert_weights)
    assert output.loss.dtype == torch.float32
    assert relative_l2(output.logits, exact.logits) <= 0.12


def test_gradients_under_autocast_are_as_close_as_the_bf16_models(fixtures):
    ids = load_file(fixtures / "k3_tiny" / "golden.safetensors")["input_ids"]
    exact = load_base(fixtures / "k3_tiny", dtype=torch.float32)
    with torch.no_grad():
        routing = exact(ids, output_routing=True).routing

    def gradient(model, *, autocast: bool) -> torch.Tensor:
        embedded = exact.model.embed_tokens(ids).to(model.dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(inputs_embeds=embedded, labels=ids, routing=routing).loss
        loss.backward()
        return embedded.grad

    expected = gradient(exact, autocast=False)
    bf16 = relative_l2(gradient(load_base(fixtures / "k3_tiny"), autocast=False), expected)
    assert relative_l2(gradient(exact, autocast=True), expected) <= 1.2 * bf16
