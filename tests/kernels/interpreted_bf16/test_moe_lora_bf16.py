"""The bf16 kernels of ``moe_lora`` in the interpreter with real bf16, held to the gates."""

import dataclasses

import pytest
import torch

from closeness import assert_close, relative_l2
from k3tune_kernels.moe_lora import configs
from k3tune_kernels.mxfp4 import decode
from moe_lora_cases import SITU, Case, build, oracle, run
from moe_lora_launch import (
    ALL_BYTES,
    dequantised,
    every_value,
    in_tiers,
    launcher_for,
    weight_through_backward,
    weight_through_forward,
)

BF16 = torch.bfloat16
SMALL = Case(num_tokens=12, dim=64, hidden=32, num_experts=3)
# One case a shape class, so that every tile shape of the table's interpreter row is walked.
CASES = {
    "few": Case(num_tokens=23, dim=96, hidden=160, num_experts=4),
    "some": Case(num_tokens=60, dim=96, hidden=160, num_experts=2, active=1, form="shared_outer"),
    "many": Case(num_tokens=100, dim=160, hidden=96, num_experts=2, rank=20),
    "empty_and_single": dataclasses.replace(SMALL, num_experts=5, route="empty_and_single"),
    "local_experts": dataclasses.replace(SMALL, local=(9, 2, 4), active=4),
    "gate_and_down": dataclasses.replace(SMALL, targets=("gate", "down")),
    "nothing_local": dataclasses.replace(SMALL, local=(9, 2, 4), route="elsewhere"),
}
LARGE = Case(num_tokens=40, dim=64, hidden=96, num_experts=3)


def assert_gates(operands):
    """Whole op within 6e-3, factors within 3e-3, and no worse than decoding to bf16 in torch."""
    actual, expected = run(operands, "triton"), oracle(operands)
    plain = run(operands, "reference")
    for name in expected:
        bound = 3e-3 if name.endswith((".A", ".B")) else 6e-3
        assert_close(name, actual[name], expected[name], max_rel=4 * bound, rms_rel=bound)
        ours, theirs = (relative_l2(each[name], expected[name]) for each in (actual, plain))
        assert ours <= 1.1 * theirs, f"{name}: {ours:.2e} against {theirs:.2e} of plain torch"


# What decides who is computed is the same code as in fp32, whose default tier has these cases.
SLOW = ("empty_and_single", "local_experts", "gate_and_down", "nothing_local")


@pytest.mark.parametrize("case", in_tiers(CASES, slow=SLOW))
def test_output_and_every_gradient(case):
    assert_gates(build(case, BF16, torch.float32, scaled=True))


def test_the_cases_reach_the_classes_they_are_named_for():
    for name in ("few", "some", "many"):
        case = CASES[name]
        rows = case.num_tokens * case.active
        assert configs.shape_class(rows, case.num_experts, BF16) == name


def test_weights_are_decoded_first_from_256_tokens_an_expert_where_they_fit():
    expert_bytes = 3072 * 3584 * 2
    assert not configs.decodes_first(896 * 256 - 1, 896, expert_bytes)
    assert configs.decodes_first(896 * 256, 896, expert_bytes)
    assert not configs.decodes_first(896 * 256, 896, 2 * expert_bytes)


def test_decoding_to_a_scratch_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(configs, "LARGE_TOKENS_PER_EXPERT", 1)
    monkeypatch.setattr(configs, "SCRATCH_BYTES", 2 * 64 * 96 * 2)
    assert_gates(build(LARGE, BF16, torch.float32))


# the interpreter runs one program after the other: what could differ is seen on a GPU
@pytest.mark.slow
def test_repeated_runs_give_the_same_bits():
    operands = build(dataclasses.replace(SMALL, form="shared_outer"), BF16, BF16)
    first, second = run(operands, "triton"), run(operands, "triton")
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_bf16_product_is_within_its_rounding():
    operands = build(Case(num_tokens=24, dim=160, hidden=96, num_experts=1), BF16, BF16)
    launcher = launcher_for(operands.x.detach(), *operands.packed)
    gate, up, hidden = (launcher.rows(96) for _ in range(3))
    launcher.gate_up(None, None, gate, up, hidden)
    out = launcher.down_forward(hidden, None)
    W = [decode(w.packed[0], w.scale[0], torch.float64) for w in operands.packed]
    x = operands.x.detach().double()
    g, u = x @ W[0].T, x @ W[1].T
    linear = SITU.linear_beta * torch.tanh(u / SITU.linear_beta)
    h = SITU.beta * torch.tanh(g / SITU.beta) * torch.sigmoid(g) * linear
    expected = {"gate": g, "up": u, "hidden": h, "down": hidden.double() @ W[2].T}
    actual = {"gate": gate, "up": up, "hidden": hidden, "down": out}
    for name, value in expected.items():
        assert_close(name, actual[name], value, max_rel=4e-3, rms_rel=2e-3)


def test_every_byte_and_scale_decodes_exactly():
    packed = ALL_BYTES.view(16, 16).expand(256, 16, 16).reshape(-1, 16).contiguous()
    scale = ALL_BYTES.repeat_interleave(16).view(-1, 1)
    actual, expected = dequantised(packed, scale, BF16), decode(packed, scale, BF16)
    assert torch.equal(actual[: 255 * 16], expected[: 255 * 16])
    assert torch.equal(actual.signbit()[: 255 * 16], expected.signbit()[: 255 * 16])
    assert actual[255 * 16 :].isnan().all()


def test_the_products_decode_exactly():
    wide, tall = every_value(rows_of_64=True), every_value(rows_of_64=False)
    forward, backward = weight_through_forward(tall, BF16), weight_through_backward(wide, BF16)
    assert torch.equal(forward, decode(tall.packed[0], tall.scale[0], BF16))
    assert torch.equal(backward, decode(wide.packed[0], wide.scale[0], BF16))
