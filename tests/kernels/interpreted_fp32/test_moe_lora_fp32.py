"""The fp32 kernels of ``moe_lora`` in the interpreter as shipped, against the fp64 oracle."""

import dataclasses

import pytest
import torch

from closeness import assert_close
from k3tune_kernels import dispatch
from k3tune_kernels.moe_lora import configs
from k3tune_kernels.mxfp4 import decode
from moe_lora_cases import Case, build, oracle, run
from moe_lora_launch import (
    ALL_BYTES,
    dequantised,
    every_value,
    in_tiers,
    launcher_for,
    weight_through_backward,
    weight_through_forward,
)

FP32 = torch.float32
SMALL = Case(num_tokens=12, dim=64, hidden=32, num_experts=3)
CASES = {
    # Widths that are multiples of 32 but of no block; several row tiles with ragged ends.
    "ragged": Case(num_tokens=23, dim=96, hidden=160, num_experts=3),
    "all_on_one_expert": Case(num_tokens=37, dim=32, hidden=64, route="one", active=1),
    "empty_and_single": dataclasses.replace(SMALL, num_experts=5, route="empty_and_single"),
    "one_token": dataclasses.replace(SMALL, num_tokens=1),
    "shared_outer_wide_rank": dataclasses.replace(SMALL, form="shared_outer", rank=70),
    "rank_1": dataclasses.replace(SMALL, rank=1),
    "only_up": dataclasses.replace(SMALL, targets=("up",)),
    "gate_and_down": dataclasses.replace(SMALL, targets=("gate", "down"), form="shared_outer"),
    "no_lora": dataclasses.replace(SMALL, targets=()),
    "local_experts": dataclasses.replace(SMALL, local=(9, 2, 4), active=4),
    "nothing_local": dataclasses.replace(SMALL, local=(9, 2, 4), route="elsewhere"),
    "no_token": dataclasses.replace(SMALL, num_tokens=0),
}


def assert_oracle(operands, **options):
    actual, expected = run(operands, "triton", **options), oracle(operands)
    for name in expected:
        assert_close(name, actual[name], expected[name], max_rel=2e-6, rms_rel=1e-6)
    return actual


@pytest.mark.parametrize("case", in_tiers(CASES, slow=("only_up",)))
def test_output_and_every_gradient(case):
    assert_oracle(build(case, FP32, FP32, scaled=True))
    assert dispatch.explain("moe_lora").backend == "triton"


# the bf16 kernels do it in the default tier
@pytest.mark.slow
def test_decoding_to_a_scratch_chunk_by_chunk_changes_nothing(monkeypatch):
    operands = build(Case(num_tokens=20, dim=64, hidden=96), FP32, FP32)
    monkeypatch.setattr(configs, "LARGE_TOKENS_PER_EXPERT", 1)
    # Two of the five experts' down weights fit, and one of its gate and up.
    monkeypatch.setattr(configs, "SCRATCH_BYTES", 2 * 64 * 96 * 4)
    assert_oracle(operands)


def test_gate_and_up_are_saved_for_the_backward_if_asked_and_that_changes_no_bit():
    operands = build(SMALL, FP32, FP32)
    rows = SMALL.num_tokens * SMALL.active
    given = {t.data_ptr() for w in operands.packed for t in w}
    given |= {t.data_ptr() for t in operands.leaves.values()}
    routing = [(SMALL.num_tokens, SMALL.active)] * 2
    narrow = [(rows, SMALL.rank)] * 3
    wide = [(rows, SMALL.hidden)] * 3
    results = []
    for keep_gate_up, expected in ((False, routing + narrow), (True, routing + narrow + wide)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            results.append(run(operands, "triton", keep_gate_up=keep_gate_up))
        own = [tuple(t.shape) for t in saved if t.dim() == 2 and t.data_ptr() not in given]
        assert sorted(own) == sorted(expected)
    first, kept = results
    for name in first:
        assert torch.equal(kept[name], first[name]), name


def test_the_scratch_is_bounded_and_reused(monkeypatch):
    weights = build(SMALL, FP32, FP32).packed
    launcher = launcher_for(torch.zeros(4, SMALL.dim), *weights)
    monkeypatch.setattr(configs, "SCRATCH_BYTES", 5 * SMALL.dim * SMALL.hidden * 4)
    chunks = list(launcher._decoded(list(weights[:2])))
    assert [chunk[:2] for chunk in chunks] == [(0, 2), (2, 3)]
    for _, _, scratch in chunks:
        assert sum(t.nbytes for t in scratch) <= configs.SCRATCH_BYTES
        assert [t.data_ptr() for t in scratch] == [t.data_ptr() for t in chunks[0][2]]


def test_bf16_factors_and_strided_activations():
    operands = build(SMALL, FP32, torch.bfloat16)
    strided = operands.x.detach().T.contiguous().T.requires_grad_()
    operands = dataclasses.replace(operands, x=strided, weights=operands.weights)
    actual, expected = run(operands, "triton"), run(operands, "reference")
    for name in expected:
        # A bf16 factor's gradient is stored in bf16: one rounding apart at most.
        bound = 5e-3 if actual[name].dtype is torch.bfloat16 else 1e-6
        assert_close(name, actual[name], expected[name], max_rel=2 * bound, rms_rel=bound)


def test_strided_weights_are_refused_rather_than_copied():
    operands = build(SMALL, FP32, FP32)
    strided = [type(w)(w.packed.mT.contiguous().mT, w.scale) for w in operands.packed]
    with pytest.raises(ValueError, match="gate: the Triton kernels expect contiguous"):
        run(dataclasses.replace(operands, packed=tuple(strided)), "triton")


def test_auto_takes_the_interpreter_for_fp32():
    assert dispatch.choose("moe_lora", "auto", torch.zeros(1)) == "triton"


def test_every_byte_and_scale_decodes_exactly():
    packed = ALL_BYTES.view(16, 16).expand(256, 16, 16).reshape(-1, 16).contiguous()
    scale = ALL_BYTES.repeat_interleave(16).view(-1, 1)
    actual, expected = dequantised(packed, scale, FP32), decode(packed, scale, FP32)
    assert torch.equal(actual[: 255 * 16], expected[: 255 * 16])
    assert torch.equal(actual.signbit()[: 255 * 16], expected.signbit()[: 255 * 16])
    assert actual[255 * 16 :].isnan().all()


# the bf16 kernels do it in the default tier
@pytest.mark.slow
def test_the_products_decode_exactly():
    wide, tall = every_value(rows_of_64=True), every_value(rows_of_64=False)
    forward, backward = weight_through_forward(tall, FP32), weight_through_backward(wide, FP32)
    assert torch.equal(forward, decode(tall.packed[0], tall.scale[0], FP32))
    assert torch.equal(backward, decode(wide.packed[0], wide.scale[0], FP32))
