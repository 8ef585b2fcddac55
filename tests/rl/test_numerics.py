"""Activations rounded as engines round them: in the op, in a model, mirrored by a trainer."""

import math

import pytest
import torch

from checkpoints import build_checkpoint
from closeness import assert_close, relative_l2
from k3tune.errors import ConfigError
from k3tune.lora import LoraSpec, adapter_parameters, adapter_state, attach_lora
from k3tune.model import load_base
from k3tune.quant.mxfp8 import round_mxfp8
from k3tune.rl import Sampling
from k3tune.rl.engines import LocalEngine
from k3tune.rl.numerics import activation_rounding
from k3tune_kernels.cpu import library
from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora
from k3tune_kernels.mxfp4 import decode

N, A, E, D, F, R = 37, 3, 6, 64, 96, 4
SITU = Situ(4.0, 25.0)
BACKENDS = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            library.obstacle() is not None, reason=f"no CPU kernels: {library.obstacle()}"
        ),
    ),
]
IDS = torch.randint(0, 90, (2, 13), generator=torch.Generator().manual_seed(1))


class Operands:
    """What one call of the op takes, the same for the same seed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5)
        shapes = ((F, D), (F, D), (D, F))
        self.weights = [
            PackedWeight(
                torch.randint(0, 256, (E, o, i // 2), dtype=torch.uint8),
                torch.randint(121, 124, (E, o, i // 32), dtype=torch.uint8),
            )
            for o, i in shapes
        ]
        self.x = torch.randn(N, D).to(dtype).requires_grad_()
        self.ids = torch.stack([torch.randperm(E)[:A] for _ in range(N)])
        self.expert_weights = torch.rand(N, A).requires_grad_()
        self.factors = [
            LoraFactors(
                (0.2 * torch.randn(E, R, i)).requires_grad_(),
                (0.2 * torch.randn(E, o, R)).requires_grad_(),
                2.0,
            )
            for o, i in shapes
        ]
        self.dy = torch.randn(N, D)

    def run(self, **options) -> list[torch.Tensor]:
        """Output and all gradients."""
        y = moe_lora(
            self.x,
            self.ids,
            self.expert_weights,
            *self.weights,
            MoELora(*self.factors),
            situ=SITU,
            **options,
        )
        (y.float() * self.dy).sum().backward()
        factors = [tensor.grad for f in self.factors for tensor in (f.A, f.B)]
        return [y.detach(), self.x.grad, self.expert_weights.grad, *factors]


def by_hand(operands: Operands, rounding) -> list[torch.Tensor]:
    """The op for each token and slot in plain torch, with the rounded values detached."""

    def straight(x):
        return x + (rounding(x) - x).detach()

    def project(x, index, expert):
        packed, scale = operands.weights[index]
        factors = operands.factors[index]
        weight = decode(packed[expert], scale[expert], torch.float32)
        low = x @ factors.A[expert].T
        return x @ weight.T + factors.scaling * low @ factors.B[expert].T

    rows = []
    for x, ids, weights in zip(operands.x, operands.ids, operands.expert_weights, strict=True):
        x, total = straight(x), 0.0
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = project(x, 0, expert), project(x, 1, expert)
            hidden = 4 * torch.tanh(gate / 4) * gate.sigmoid() * 25 * torch.tanh(up / 25)
            total = total + weight * project(straight(hidden), 2, expert)
        rows.append(total)
    y = torch.stack(rows)
    (y * operands.dy).sum().backward()
    factors = [tensor.grad for f in operands.factors for tensor in (f.A, f.B)]
    return [y.detach(), operands.x.grad, operands.expert_weights.grad, *factors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounding", ["none", "bf16", "mxfp8"])
def test_the_op_rounds_what_enters_each_projection_and_passes_gradients_through(rounding, backend):
    functions = {"none": lambda x: x, "bf16": lambda x: x.bfloat16().float(), "mxfp8": round_mxfp8}
    expected = by_hand(Operands(), functions[rounding])
    actual = Operands().run(activation_rounding=rounding, backend=backend)
    # A hidden value beside a rounding boundary may fall to the other side, by 2^-9 of it: what is
    # rounded, changed at random by 1e-6, moved y by up to 3.0e-4 in 60 draws.
    bound = {"none": 1e-6, "bf16": 4e-4, "mxfp8": 3e-3}[rounding]
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(f"{rounding} {number}", one, other, max_rel=10 * bound, rms_rel=bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_bfloat16_only_mxfp8_changes_anything(backend):
    none, bf16, mxfp8 = (
        Operands(torch.bfloat16).run(activation_rounding=rounding, backend=backend)
        for rounding in ("none", "bf16", "mxfp8")
    )
    for one, other in zip(bf16, none, strict=True):
        assert_close("bf16", one, other, max_rel=2e-2, rms_rel=3e-3)
    # half a step of three mantissa bits: 2 to 3 percent a value
    assert 1e-2 < relative_l2(mxfp8[0], none[0]) < 1e-1


def test_other_roundings_and_backends_are_refused():
    with pytest.raises(ValueError, match=r"one of \('none', 'bf16', 'mxfp8'\), found 'fp8'"):
        Operands().run(activation_rounding="fp8")
    with pytest.raises(ValueError, match="backend 'triton' was asked for, but"):
        Operands().run(activation_rounding="mxfp8", backend="triton")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_checkpoint(
        tmp_path_factory.mktemp("base"),
        num_hidden_layers=4,
        mla_layers=[2],
        num_experts=5,
        vocab_size=96,
    )


def adapted(folder, dtype=torch.float32):
    """A model with a live adapter on the experts and the attention."""
    model = attach_lora(
        load_base(folder, dtype=dtype), LoraSpec(targets=("attention", "experts"), rank=2, alpha=4)
    )
    generator = torch.Generator().manual_seed(7)
    for group in adapter_parameters(model).values():
        for factor in group.values():
            factor.data.normal_(std=0.1, generator=generator)
    return model


def test_a_model_is_rounded_inside_the_context_alone(folder):
    model = adapted(folder)
    plain = model(IDS).logits
    with activation_rounding(model, "mxfp8"):
        rounded = model(IDS).logits
        with activation_rounding(model, "none"):
            assert torch.equal(model(IDS).logits, plain)
        assert torch.equal(model(IDS).logits, rounded)
    assert torch.equal(model(IDS).logits, plain)
    assert 1e-3 < relative_l2(rounded, plain) < 0.5


def test_an_error_inside_the_context_ends_it(folder):
    model = adapted(folder)
    plain = model(IDS).logits
    with pytest.raises(KeyError), activation_rounding(model, "bf16"):
        raise KeyError
    assert torch.equal(model(IDS).logits, plain)


def test_rounded_activations_train(folder):
    model = adapted(folder)
    model.train()
    gradients = {}
    for activations in ("none", "mxfp8"):
        model.zero_grad()
        with activation_rounding(model, activations):
            model(IDS, labels=IDS).loss.backward()
        groups = adapter_parameters(model)
        gradients[activations] = torch.cat([f.grad.flatten() for f in groups["experts"].values()])
    # a gradient through the rounding itself would be zero nearly everywhere
    assert 1e-3 < relative_l2(gradients["mxfp8"], gradients["none"]) < 0.5


@pytest.mark.parametrize("activations", ["fp8", "", "MXFP8"])
def test_another_name_is_refused(folder, activations):
    with (
        pytest.raises(ConfigError, match="expected one of none, bf16, mxfp8"),
        activation_rounding(torch.nn.Identity(), activations),
    ):
        pass


def test_a_model_without_experts_is_refused():
    with (
        pytest.raises(ConfigError, match="Identity has no routed experts"),
        activation_rounding(torch.nn.Identity(), "mxfp8"),
    ):
        pass


def mean_k3(model, engine_activations, trainer_activations) -> float:
    """KL estimate between what an engine samples and a scoring pass of the trainer's model."""
    engine = LocalEngine(model, activations=engine_activations)
    engine.load_adapter(1, adapter_state(model))
    sampling = Sampling(max_new_tokens=24, stop_token_ids=())
    prompts = [[n, n + 1, n + 2] for n in range(12)]
    differences = []
    for rollout in engine.generate(prompts, sampling, range(12)):
        row = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        with torch.no_grad(), activation_rounding(model, trainer_activations):
            logits = model(row[:, :-1]).logits[0, 2:]
        scored = logits.float().log_softmax(-1).gather(1, row[0, 3:, None])[:, 0]
        differences += (scored - torch.tensor(rollout.logprobs)).tolist()
    return sum(math.expm1(r) - r for r in differences) / len(differences)


def test_a_trainer_that_mirrors_the_engine_is_a_thousand_times_nearer(folder):
    model = adapted(folder)
    mirrored = mean_k3(model, "mxfp8", "mxfp8")
    # one activation at the edge of a rounding step: 1.7e-6 in plain torch on a Xeon, else 4e-13
    assert mirrored < 1e-5
    assert mean_k3(model, "mxfp8", "none") > max(1000 * mirrored, 1e-6)
