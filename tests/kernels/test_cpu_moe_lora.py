"""The op on the native CPU kernels: against the fp64 oracle, and beside the reference."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close, relative_l2
from cpu_cases import ISAS, error, forward_cpu, needs_library, run_cpu
from k3tune_kernels.moe_lora import LoraFactors, MoELora
from moe_lora_cases import FORMS, Case, build, oracle, run

pytestmark = needs_library

CASES = {
    "spread": Case(),
    "one_token": Case(num_tokens=1),
    "odd_sizes": Case(num_tokens=63, dim=160, hidden=32, num_experts=7, active=3),
    "all_on_one_expert": Case(route="one", active=1),
    "twice_on_one_expert": Case(route="one"),
    "empty_and_single": Case(route="empty_and_single"),
    "shared_outer": Case(form="shared_outer"),
    "rank_1": Case(rank=1),
    "rank_16": Case(rank=16),
    "rank_above_width": Case(rank=130),
    "many_rows": Case(num_tokens=200, dim=96, hidden=64, rank=8),
    "no_lora": Case(targets=()),
    "only_down": Case(targets=("down",)),
    "gate_without_up": Case(targets=("gate", "down"), form="shared_outer"),
    "one_expert": Case(num_experts=1, active=1, form="shared_outer"),
    "local_experts": Case(local=(9, 2, 4, 11, 0), active=4),
    "nothing_local": Case(local=(9, 2, 4, 11, 0), route="elsewhere"),
    "no_token": Case(num_tokens=0),
    "no_expert_a_token": Case(active=0),
}


def check_bf16(operands, isa) -> None:
    """Within the gate, and no worse than the reference's bf16, both against fp64."""
    actual, expected = run_cpu(operands, isa), oracle(operands)
    reference = run(operands, "reference")
    for name in expected:
        ours, other = (error(name, r, expected, operands) for r in (actual, reference))
        assert ours <= 6e-3 and ours <= 1.1 * other + 1e-6, f"{name}: {ours:.1e}, {other:.1e}"
        assert actual[name].dtype == operands.leaves.get(name, operands.x).dtype


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fp32_is_within_rounding_of_the_oracle(case, isa):
    operands = build(case, torch.float32, torch.float32, scaled=True)
    actual, expected = run_cpu(operands, isa), oracle(operands)
    for name in expected:
        assert_close(name, actual[name], expected[name], max_rel=2e-6, rms_rel=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bf16_is_within_the_gate_and_no_worse_than_the_reference(case, isa):
    check_bf16(build(case, torch.bfloat16, torch.float32, scaled=True), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_factors_in_bf16_get_gradients_in_bf16(isa):
    check_bf16(build(Case(num_tokens=40, rank=5), torch.bfloat16, torch.bfloat16), isa)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(
    case=st.builds(
        Case,
        num_tokens=st.integers(0, 70),
        active=st.integers(1, 3),
        dim=st.integers(1, 6).map(lambda groups: 32 * groups),
        hidden=st.integers(1, 6).map(lambda groups: 32 * groups),
        num_experts=st.integers(4, 9),
        rank=st.integers(1, 20),
        form=st.sampled_from(FORMS),
        targets=st.sets(st.sampled_from(MoELora._fields)).map(tuple),
        route=st.sampled_from(["spread", "spread", "one", "empty_and_single"]),
        local=st.sampled_from([None, None, (7, 1, 3, 0)]),
        seed=st.integers(0, 2**31),
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_case_is_within_the_gate(isa, case, dtype):
    if case.local is not None:
        case = dataclasses.replace(case, num_experts=len(case.local))
    if case.route == "empty_and_single" and case.num_tokens == 0:
        case = dataclasses.replace(case, route="spread")
    if case.route == "empty_and_single" and case.num_experts < case.active + 2:
        case = dataclasses.replace(case, active=1)
    operands = build(case, dtype, torch.float32, scaled=True)
    actual, expected = run_cpu(operands, isa), oracle(operands)
    bound = 1e-6 if dtype is torch.float32 else 6e-3
    found = {name: error(name, actual, expected, operands) for name in expected}
    beyond = [name for name in expected if found[name] > bound]
    # a gradient that is a sum may cancel to any fraction of its terms: the reference's does too
    reference = run(operands, "reference") if beyond else {}
    for name in beyond:
        assert found[name] <= error(name, reference, expected, operands), name


@pytest.mark.parametrize(
    ("route", "form"),
    [
        ("one", "shared_outer"),
        ("spread", "per_expert"),
        # each of these meets the other in a pair above
        pytest.param("one", "per_expert", marks=pytest.mark.slow),
        pytest.param("spread", "shared_outer", marks=pytest.mark.slow),
    ],
)
def test_more_rows_than_are_kept_at_a_time_go_through_in_waves(route, form):
    case = Case(num_tokens=80_000, active=2, dim=32, hidden=32, num_experts=3, form=form)
    operands = build(dataclasses.replace(case, num_tokens=1), torch.float32, torch.float32)
    x = torch.randn(case.num_tokens, 32)
    ids = torch.stack([torch.arange(case.num_tokens) % 3, (torch.arange(case.num_tokens) + 1) % 3])
    operands = dataclasses.replace(
        operands,
        x=x.requires_grad_(),
        ids=ids.T.contiguous() if route == "spread" else torch.ones(case.num_tokens, 2).long(),
        weights=torch.rand(case.num_tokens, 2).requires_grad_(),
        grad_out=torch.randn(case.num_tokens, 32),
    )
    actual, expected = run_cpu(operands), oracle(operands)
    for name in expected:
        # sums over 10^5 rows in fp32
        assert relative_l2(actual[name], expected[name]) <= 1e-5, name


def test_mixed_ranks_padded_with_zeros_are_the_unpadded_ones():
    operands = build(Case(rank=3), torch.float32, torch.float32)
    padded = MoELora(
        *(
            LoraFactors(
                torch.nn.functional.pad(f.A.detach(), (0, 0, 0, 5)),
                torch.nn.functional.pad(f.B.detach(), (0, 5)),
                torch.full((5,), float(f.scaling)),
            )
            for f in operands.lora
        )
    )
    actual = forward_cpu(dataclasses.replace(operands, lora=padded))
    assert relative_l2(actual, forward_cpu(operands)) < 1e-6


def test_zero_B_is_the_base_to_the_bit():
    for dtype in (torch.float32, torch.bfloat16):
        operands = build(Case(), dtype, torch.float32)
        with torch.no_grad():
            for factors in operands.lora:
                factors.B.zero_()
        base = dataclasses.replace(operands, lora=MoELora())
        assert torch.equal(forward_cpu(operands), forward_cpu(base))


def test_two_slices_of_experts_add_up_to_the_whole():
    operands = build(Case(num_tokens=40, num_experts=6, active=3), torch.float32, torch.float32)

    def part(rows: list[int]) -> torch.Tensor:
        return forward_cpu(
            dataclasses.replace(
                operands,
                packed=tuple(type(w)(w.packed[rows], w.scale[rows]) for w in operands.packed),
                lora=MoELora(*(LoraFactors(f.A[rows], f.B[rows], 0.75) for f in operands.lora)),
                local_experts=torch.tensor(rows),
            )
        )

    whole = forward_cpu(operands)
    assert relative_l2(part([5, 0, 2]) + part([1, 3, 4]), whole) < 1e-6


def test_only_what_asks_for_a_gradient_gets_one():
    operands = build(Case(), torch.bfloat16, torch.float32)
    operands.x.requires_grad_(False)
    operands.weights.requires_grad_(False)
    operands.lora.gate.A.requires_grad_(False)
    expected = oracle(operands)
    forward_cpu(operands).backward(operands.grad_out)
    for name, leaf in operands.leaves.items():
        if name in ("x", "weights", "gate.A"):
            assert leaf.grad is None
        else:
            assert relative_l2(leaf.grad, expected[name]) < 6e-3, name


def test_the_backward_keeps_operands_and_narrow_rows_only():
    case = Case(num_tokens=8)
    operands = build(case, torch.bfloat16, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        forward_cpu(operands)
    own = {t.data_ptr() for t in operands.leaves.values()}
    extra = [t for t in kept if t.is_floating_point() and t.data_ptr() not in own]
    assert [t.shape for t in extra] == [(case.num_tokens * case.active, 3 * case.rank)]


def test_non_contiguous_operands_give_the_same_bits():
    operands = build(Case(dim=96), torch.bfloat16, torch.float32)
    expected = run_cpu(operands)

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.detach().mT.contiguous().mT

    def spaced(t: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(t.shape[0], 2 * t.shape[1], t.shape[2] + 5, dtype=t.dtype)
        view = wide[:, ::2, 3:-2]
        view.copy_(t)
        return view

    for rearranged in (turned, spaced):
        strided = dataclasses.replace(
            operands,
            x=turned(operands.x).requires_grad_(),
            ids=turned(operands.ids).int(),
            weights=turned(operands.weights).requires_grad_(),
            packed=tuple(type(w)(*map(rearranged, w)) for w in operands.packed),
            lora=MoELora(
                *(
                    LoraFactors(turned(f.A).requires_grad_(), turned(f.B).requires_grad_(), 0.75)
                    for f in operands.lora
                )
            ),
            grad_out=turned(operands.grad_out),
        )
        actual = run_cpu(strided)
        for name in expected:
            assert torch.equal(actual[name], expected[name]), name


def test_weights_may_be_a_file_mapped_into_memory(tmp_path):
    operands = build(Case(), torch.bfloat16, torch.float32)

    def mapped(tensor: torch.Tensor, name: str) -> torch.Tensor:
        file = tmp_path / name
        file.write_bytes(tensor.contiguous().numpy().tobytes())
        flat = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=torch.uint8)
        return flat.view(tensor.shape)

    packed = tuple(
        type(w)(mapped(w.packed, f"{i}.packed"), mapped(w.scale, f"{i}.scale"))
        for i, w in enumerate(operands.packed)
    )
    expected, actual = run_cpu(operands), run_cpu(dataclasses.replace(operands, packed=packed))
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_autocast_changes_nothing():
    operands = build(Case(), torch.float32, torch.float32)
    expected = run_cpu(operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run_cpu(operands)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_beyond_the_fast_range_agree_with_the_oracle(dtype):
    operands = build(Case(num_tokens=40), dtype, torch.float32, scaled=True)
    # weights of 2^-127: lost unless they are multiplied in fp32
    x = (operands.x.detach() * 2.0**60).requires_grad_()
    for weight in operands.packed[:2]:
        weight.scale[:2] = 0
    operands = dataclasses.replace(operands, x=x)
    actual, expected = run_cpu(operands), oracle(operands)
    bound = 1e-6 if dtype is torch.float32 else 6e-3
    for name in expected:
        assert error(name, actual, expected, operands) <= bound, name
