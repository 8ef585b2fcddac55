"""Gradients reach the embeddings through every block, and are those of finite differences."""

import pytest
import torch

from checkpoints import build_checkpoint
from k3tune.model import load_base
from k3tune.model.documents import Documents
from k3tune.model.layers import mix_residuals

DIRECTIONS = 6
STEP = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = build_checkpoint(tmp_path_factory.mktemp("gradients"), num_experts=6)
    return load_base(folder, dtype=torch.float64)


def assert_gradient_is_the_difference_quotient(function, x: torch.Tensor) -> None:
    """Central differences of ``sum(weights * function(x))`` along random directions."""
    weights = torch.randn_like(function(x))
    x = x.detach().requires_grad_()
    (function(x) * weights).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    for _ in range(DIRECTIONS):
        direction = torch.randn_like(x)
        with torch.no_grad():
            ahead = (function(x + STEP * direction) * weights).sum()
            behind = (function(x - STEP * direction) * weights).sum()
        quotient = (ahead - behind) / (2 * STEP)
        slope = (x.grad * direction).sum()
        assert (slope - quotient).abs() <= 1e-6 * max(1.0, quotient.abs().item())


def hidden(model, length: int = 7) -> torch.Tensor:
    return torch.randn(2, length, model.model.architecture.hidden_size, dtype=torch.float64)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("kind", ["KimiDeltaAttention", "GatedMLA"])
def test_attention(model, kind, documents):
    attention = next(
        layer.self_attn for layer in model.model.layers if type(layer.self_attn).__name__ == kind
    )
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 0, 0, 0]]) if documents else None
    assert_gradient_is_the_difference_quotient(
        lambda x: attention(x, Documents(ids, x.shape[1])), hidden(model)
    )


def test_latent_moe_with_its_router(model):
    moe = model.model.layers[-1].block_sparse_moe
    x = hidden(model)
    chosen = moe(x)[1].expert_ids
    assert_gradient_is_the_difference_quotient(lambda x: moe(x, chosen)[0], x)
    # the routing weights carry part of it: the router is frozen, its gradient reaches x
    assert_gradient_is_the_difference_quotient(lambda x: moe.gate(x, chosen).expert_weights, x)


def test_residual_mixer_in_every_source(model):
    layer = model.model.layers[-1]
    norm, query = layer.mlp_res_norm, layer.mlp_res_proj
    sources = [hidden(model) for _ in range(3)]
    for index in range(3):

        def mixed(x, index=index):
            return mix_residuals([*sources[:index], x, *sources[index + 1 :]], norm, query, "auto")

        assert_gradient_is_the_difference_quotient(mixed, sources[index])


def test_whole_model_with_and_without_activation_checkpointing(model):
    ids = torch.randint(0, model.model.architecture.vocab_size, (2, 7))
    embedded = model.model.embed_tokens(ids)
    with torch.no_grad():
        routing = model(ids, output_routing=True).routing
    assert_gradient_is_the_difference_quotient(
        lambda x: model(inputs_embeds=x, labels=ids, routing=routing).loss[None], embedded
    )
    gradients = []
    for checkpointed in (False, True):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        x = embedded.detach().requires_grad_()
        output = model(inputs_embeds=x, labels=ids, output_routing=True)
        output.loss.backward()
        gradients.append(x.grad)
        assert all(
            torch.equal(output.routing[n].expert_ids, routing[n].expert_ids) for n in routing
        )
    model.gradient_checkpointing_disable()
    model.eval()
    assert torch.equal(*gradients)


def test_replay_under_activation_checkpointing_uses_the_given_experts(model):
    ids = torch.randint(0, model.model.architecture.vocab_size, (1, 7))
    free = model(ids, output_routing=True).routing
    given = {layer: (entry.expert_ids + 1) % 6 for layer, entry in free.items()}
    model.train()
    model.gradient_checkpointing_enable()
    x = model.model.embed_tokens(ids).detach().requires_grad_()
    output = model(inputs_embeds=x, labels=ids, routing=given, output_routing=True)
    output.loss.backward()
    model.gradient_checkpointing_disable()
    model.eval()
    for layer, expected in given.items():
        assert torch.equal(output.routing[layer].expert_ids, expected)
    replayed = model(inputs_embeds=x.detach(), labels=ids, routing=output.routing).loss
    assert torch.equal(replayed, output.loss)


def test_the_base_is_frozen(model):
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ids = torch.randint(0, model.model.architecture.vocab_size, (1, 5))
    x = model.model.embed_tokens(ids).requires_grad_()
    model(inputs_embeds=x, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
