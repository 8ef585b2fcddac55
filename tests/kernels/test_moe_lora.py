"""The op through its reference: against an fp64 oracle, and what it promises of gradients."""

import dataclasses

import pytest
import torch

from closeness import assert_close, relative_l2
from k3tune_kernels import dispatch
from k3tune_kernels.moe_lora import LoraFactors, MoELora, moe_lora
from moe_lora_cases import FORMS, SITU, Case, build, oracle, run

CASES = {
    "spread": Case(),
    "one_token": Case(num_tokens=1),
    "odd_sizes": Case(num_tokens=63, dim=160, hidden=32, num_experts=7, active=3),
    "all_on_one_expert": Case(route="one", active=1),
    "empty_and_single": Case(route="empty_and_single"),
    "shared_outer": Case(form="shared_outer"),
    "rank_1": Case(rank=1),
    "rank_above_width": Case(rank=130),
    "no_lora": Case(targets=()),
    "only_down": Case(targets=("down",)),
    "gate_without_up": Case(targets=("gate", "down"), form="shared_outer"),
    "local_experts": Case(local=(9, 2, 4, 11, 0), active=4),
    "nothing_local": Case(local=(9, 2, 4, 11, 0), route="elsewhere"),
    "no_token": Case(num_tokens=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fp64_equals_the_oracle_in_the_output_and_every_gradient(case):
    operands = build(case, torch.float64, torch.float64, scaled=True)
    actual, expected = run(operands, "reference"), oracle(operands)
    for name in expected:
        assert_close(name, actual[name], expected[name], max_rel=1e-12, rms_rel=1e-12)


@pytest.mark.parametrize("lora_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp32_is_within_rounding_of_the_oracle(lora_dtype):
    operands = build(Case(), torch.float32, lora_dtype)
    actual, expected = run(operands, "reference"), oracle(operands)
    for name in expected:
        floor = 3e-3 if actual[name].dtype is torch.bfloat16 else 1e-6
        assert_close(name, actual[name], expected[name], max_rel=2 * floor, rms_rel=floor)


def test_bf16_is_within_the_gate_of_the_oracle():
    operands = build(Case(num_tokens=64, dim=128), torch.bfloat16, torch.float32)
    actual, expected = run(operands, "reference"), oracle(operands)
    for name in expected:
        assert_close(name, actual[name], expected[name], max_rel=3e-2, rms_rel=8e-3)
        assert actual[name].dtype == operands.leaves.get(name, operands.x).dtype


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    case = Case(num_tokens=5, dim=32, hidden=32, rank=2, num_experts=4, form=form)
    operands = build(case, torch.float64, torch.float64, scaled=True)
    scalings = [factors.scaling for factors in operands.lora]

    def op(x, weights, *factors):
        pairs = zip(factors[0::2], factors[1::2], scalings, strict=True)
        lora = MoELora(*(LoraFactors(A, B, s) for A, B, s in pairs))
        ids = operands.ids
        return moe_lora(x, ids, weights, *operands.packed, lora, situ=SITU, backend="reference")

    assert torch.autograd.gradcheck(op, tuple(operands.leaves.values()), fast_mode=True)


def note(names: list[str], name: str):
    """A hook that appends ``name``."""
    return lambda _: names.append(name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gradients_are_ready_in_one_order_whatever_was_routed(form, backend):
    """Processes that average gradients as they come would add up different factors' else."""
    orders = []
    for case in (
        Case(form=form),
        Case(form=form, num_tokens=0),
        Case(form=form, route="one", active=1),
        Case(form=form, local=(9, 2, 4, 11, 0), route="elsewhere"),
    ):
        operands = build(case, torch.float32, torch.float32)
        ready: list[str] = []
        for name, leaf in operands.leaves.items():
            leaf.register_post_accumulate_grad_hook(note(ready, name))
        out = moe_lora(
            *(operands.x, operands.ids, operands.weights, *operands.packed, operands.lora),
            situ=SITU,
            local_experts=operands.local_experts,
            backend=backend,
        )
        out.backward(operands.grad_out)
        orders.append([name for name in ready if "." in name])
    assert len(orders[0]) == 6 and all(order == orders[0] for order in orders), orders


def test_a_factor_is_touched_even_when_no_token_is_here():
    operands = build(Case(local=(9, 2, 4, 11, 0), route="elsewhere"), torch.float32, torch.float32)
    out = moe_lora(
        operands.x,
        operands.ids,
        operands.weights,
        *operands.packed,
        operands.lora,
        situ=SITU,
        local_experts=operands.local_experts,
    )
    assert not out.any()
    out.sum().backward()
    for name, leaf in operands.leaves.items():
        assert leaf.grad is not None and not leaf.grad.any(), name


def test_two_slices_of_experts_add_up_to_the_whole():
    case = Case(num_tokens=40, num_experts=6, active=3)
    whole = build(case, torch.float64, torch.float64)
    expected = run(whole, "reference")["out"]

    def part(rows: list[int]) -> torch.Tensor:
        weights = [type(w)(w.packed[rows], w.scale[rows]) for w in whole.packed]
        lora = MoELora(*(LoraFactors(f.A[rows], f.B[rows], f.scaling) for f in whole.lora))
        return moe_lora(
            whole.x,
            whole.ids,
            whole.weights,
            *weights,
            lora,
            situ=SITU,
            local_experts=torch.tensor(rows),
        )

    assert relative_l2(part([5, 0, 2]) + part([1, 3, 4]), expected) < 1e-14


def test_zero_B_is_the_base_to_the_bit():
    operands = build(Case(), torch.bfloat16, torch.bfloat16)
    with torch.no_grad():
        for factors in operands.lora:
            factors.B.zero_()
    base = dataclasses.replace(operands, lora=MoELora())
    assert torch.equal(run(operands, "reference")["out"], run(base, "reference")["out"])


def test_padding_a_rank_with_zeros_changes_nothing():
    operands = build(Case(rank=3), torch.float64, torch.float64)
    padded = dataclasses.replace(
        operands,
        lora=MoELora(
            *(
                LoraFactors(
                    torch.nn.functional.pad(f.A.detach(), (0, 0, 0, 5)).requires_grad_(),
                    torch.nn.functional.pad(f.B.detach(), (0, 5)).requires_grad_(),
                    f.scaling,
                )
                for f in operands.lora
            )
        ),
    )
    assert relative_l2(run(padded, "reference")["out"], run(operands, "reference")["out"]) < 1e-15


def test_autocast_changes_nothing():
    operands = build(Case(), torch.float32, torch.float32)
    expected = run(operands, "reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(operands, "reference")
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_the_backward_keeps_no_decoded_weight():
    operands = build(Case(num_tokens=8), torch.float32, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(operands, "reference")
    sizes = {tuple(t.shape) for t in kept if t.is_floating_point()}
    assert sizes and not sizes & {(96, 64), (64, 96)}


def test_non_contiguous_operands():
    operands = build(Case(), torch.float64, torch.float64)
    expected = run(operands, "reference")["out"]
    strided = moe_lora(
        operands.x.detach().T.contiguous().T,
        operands.ids.T.contiguous().T,
        operands.weights.detach().T.contiguous().T,
        *(
            type(w)(w.packed.mT.contiguous().mT, w.scale.mT.contiguous().mT)
            for w in operands.packed
        ),
        operands.lora,
        situ=SITU,
    )
    assert torch.equal(strided, expected)


def test_plain_tuples_and_int32_ids_are_accepted():
    operands = build(Case(), torch.float32, torch.float32)
    expected = run(operands, "reference")["out"]
    weights = [tuple(w) for w in operands.packed]
    lora = tuple(tuple(f) for f in operands.lora)
    x, ids, shares = operands.x, operands.ids.int(), operands.weights
    actual = moe_lora(x, ids, shares, *weights, lora, situ=(4.0, 25.0), backend="reference")
    assert torch.equal(actual, expected)
    assert dispatch.explain("moe_lora").backend == "reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(24, 32)}, r"expected packed gate, up, down"),
        ({"x": torch.zeros(24, 64).long()}, r"x: expected floating \[N, D\]"),
        ({"ids": torch.full((24, 2), 5)}, r"ids in 0\.\.4, found 5\.\.5; pass local_experts"),
        ({"ids": torch.zeros(24, 2)}, "int32 or int64"),
        ({"weights": torch.zeros(24, 3)}, r"shape of expert_ids \(24, 2\), found \(24, 3\)"),
        ({"local_experts": torch.arange(4)}, r"int64 \[5\]"),
        (
            {"lora": MoELora(down=LoraFactors(torch.zeros(5, 2, 64), torch.zeros(5, 64, 2), 1.0))},
            r"lora\.down: expected I = 96 and O = 64, found 64 and 64",
        ),
        (
            {"lora": MoELora(up=LoraFactors(torch.zeros(3, 2, 64), torch.zeros(5, 96, 2), 1.0))},
            "1 or 5 experts, found 3 and 5",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(change, message):
    operands = dataclasses.replace(build(Case(), torch.float32, torch.float32), **change)
    with pytest.raises(ValueError, match=message):
        run(operands, "reference")
