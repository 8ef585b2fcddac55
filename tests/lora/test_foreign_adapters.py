"""Adapters others wrote, against a second K3 whose weights have the update merged in, in fp64."""

import pytest
import torch

from closeness import relative_l2
from independent_k3 import IndependentK3
from k3tune.lora import adapter_gradients, adapter_state, load_adapter, save_adapter
from k3tune.model import load_base

MOE = "model.layers.{}.block_sparse_moe."
SIZES = {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}
LINEAR = {
    "model.layers.0.self_attn.q_proj": (32, 48),
    "model.layers.0.mlp.down_proj": (48, 96),
    "model.layers.1.block_sparse_moe.routed_expert_up_proj": (48, 32),
    "model.layers.1.block_sparse_moe.shared_experts.gate_proj": (64, 48),
    "model.layers.2.self_attn.kv_b_proj": (64, 24),
}


class MergedK3(IndependentK3):
    """The second implementation, with ``scale * B A`` added to the weights it reads."""

    def __init__(self, folder, factors, scales):
        super().__init__(folder)
        self.factors = {key: value.double().requires_grad_() for key, value in factors.items()}
        self.scales = scales

    def update(self, name):
        pair = [self.factors.get(f"{name}.lora_{half}.weight") for half in "AB"]
        return 0 if pair[0] is None else self.scales(name, len(pair[0])) * pair[1] @ pair[0]

    def weight(self, name):
        return super().weight(name) + self.update(name.removesuffix(".weight"))

    def expert(self, name):
        stack, expert, projection = name.rsplit(".", 2)
        # a stacked or shared factor stands under every expert's name, as a part of one leaf
        return super().expert(name) + self.update(f"{stack}.{expert}.{projection}")

    def loss(self, ids):
        losses = [
            torch.nn.functional.cross_entropy(self.logits(row)[:-1], torch.tensor(row[1:]))
            for row in ids.tolist()
        ]
        return torch.stack(losses).mean()


def linear_factors(rank):
    return {
        f"{name}.lora_{half}.weight": torch.randn(shape) * 0.2
        for name, (out, inputs) in LINEAR.items()
        for half, shape in (("A", (rank, inputs)), ("B", (out, rank)))
    }


def expert_factors(rank_of):
    """2-D factors of every expert whose rank is not 0."""
    factors = {}
    for layer in (1, 2):
        for projection, (out, inputs) in SIZES.items():
            for expert in range(5):
                rank = rank_of(layer, expert, projection)
                at = f"{MOE.format(layer)}experts.{expert}.{projection}."
                if rank:
                    factors[f"{at}lora_A.weight"] = torch.randn(rank, inputs) * 0.2
                    factors[f"{at}lora_B.weight"] = torch.randn(out, rank) * 0.2
    return factors


def compare(folder, ids, model, merged, keys):
    """Loss and gradients of the model and of the merged weights; ``keys``: file key -> name."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = merged.loss(ids)
    expected.backward()
    # scales of single experts are FP32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)
    gradients = adapter_gradients(model)
    assert gradients.keys() == keys.keys()
    for key, name in keys.items():
        reference = merged.factors[name].grad
        # a factor of an expert without tokens has no gradient on one side, zeros on the other
        assert (
            relative_l2(gradients[key], torch.zeros(()) if reference is None else reference) < 1e-5
        )


@pytest.fixture
def fp64(folder):
    # FP32 factors are cast to fp64 inside, and their gradients rounded to FP32
    return load_base(folder, dtype=torch.float64, kernels="reference")


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "language_model."])
def test_experts_one_by_one_with_ranks_of_their_own(folder, fp64, ids, write_adapter, prefix):
    factors = linear_factors(3) | expert_factors(lambda layer, expert, _: 1 + (expert + layer) % 3)
    path = write_adapter(
        {f"{prefix}{name}": value for name, value in factors.items()},
        r=3,
        alpha_pattern={"q_proj": 9, r"layers\.2\..*experts\.1\.w1": 12},
    )

    def scale(name, rank):
        special = {"0.self_attn.q_proj": 9, "2.block_sparse_moe.experts.1.w1": 12}
        return special.get(name.removeprefix("model.layers."), 6) / rank

    model = load_adapter(fp64, path, trainable=True)
    keys = {f"{prefix}{name}": name for name in factors}
    compare(folder, ids, model, MergedK3(folder, factors, scale), keys)


def test_experts_without_factors_stay_unadapted(folder, fp64, ids, write_adapter, caplog):
    factors = expert_factors(lambda layer, expert, _: 0 if expert == layer else 2)
    path = write_adapter(factors, use_rslora=True)
    model = load_adapter(fp64, path, trainable=True)
    assert "6 experts have no factors and stay unadapted: model.layers.1" in caplog.text
    merged = MergedK3(folder, factors, lambda name, rank: 6 / rank**0.5)
    compare(folder, ids, model, merged, {name: name for name in factors})


def test_two_dimensional_shared_factors(folder, fp64, ids, write_adapter):
    factors = expert_factors(lambda *_: 2)
    files = {}
    for name, value in factors.items():
        stack, _, projection, half = name.removesuffix(".weight").rsplit(".", 3)
        if (projection == "w2") == (half == "lora_B"):
            shared = f"{stack}.{projection}.{half}.weight"
            files.setdefault(shared, value)
        else:
            files[name] = value
    merged = MergedK3(folder, {}, lambda name, rank: 6 / rank)
    merged.factors = {name: value.double().requires_grad_() for name, value in files.items()}
    for name in factors:
        stack, _, projection, half = name.removesuffix(".weight").rsplit(".", 3)
        shared = f"{stack}.{projection}.{half}.weight"
        if shared in merged.factors:
            merged.factors[name] = merged.factors[shared]
    model = load_adapter(fp64, write_adapter(files), trainable=True)
    compare(folder, ids, model, merged, {name: name for name in files})


@pytest.mark.parametrize("case", ["ranks", "missing", "alphas"])
def test_what_cannot_be_stacked_is_saved_expert_by_expert(
    folder, ids, write_adapter, tmp_path, case
):
    rank_of = {
        "ranks": lambda layer, expert, projection: 1 + (expert + layer) % 3,
        "missing": lambda layer, expert, projection: 0 if expert == 4 else 2,
        "alphas": lambda layer, expert, projection: 2,
    }[case]
    factors = linear_factors(2) | expert_factors(rank_of)
    pattern = {r"experts\.3\.w3": 1.5} if case == "alphas" else {}

    def load(path):
        return load_adapter(load_base(folder, dtype=torch.float32, kernels="reference"), path)

    model = load(write_adapter(factors, alpha_pattern=pattern))
    again = load(save_adapter(model, tmp_path / "saved", dtype=torch.float32))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    state = adapter_state(again)
    for name, value in adapter_state(model).items():
        key = f"base_model.model.language_model.{name}"
        # projections whose experts are all alike are stacked even here
        if key in state:
            assert torch.equal(state[key], value)
        else:
            assert case == "alphas" and "experts." in name
