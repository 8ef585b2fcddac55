"""Muon, AdamW and Quantile Balancing as k3-nano's pre-training uses them."""

import torch
from torch import nn

from nano_model import build_model, nano_config
from nano_optimizer import NanoOptimizer, QuantileBalancer, Rates, orthogonalize

CONFIG = nano_config({"bos_token_id": 368, "eos_token_id": 370, "pad_token_id": 383})


def test_orthogonalize_keeps_singular_vectors_and_levels_singular_values():
    torch.manual_seed(0)
    for shape in ((5, 16, 32), (5, 32, 16)):
        matrices = torch.randn(shape)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        inside = u.mT @ orthogonalize(matrices) @ vh.mT
        values = inside.diagonal(dim1=1, dim2=2)
        assert values.min() > 0.5 and values.max() < 1.3
        assert (inside - torch.diag_embed(values)).abs().max() < 0.05


def test_muon_agrees_with_torchs_own_on_a_matrix():
    torch.manual_seed(0)
    model = build_model(CONFIG)
    projection = model.model.layers[0].self_attn.o_proj
    own = nn.Parameter(projection.weight.detach().clone())
    theirs = torch.optim.Muon([own], lr=0.02, momentum=0.95, weight_decay=0.1)
    ours = NanoOptimizer(model, Rates())
    for _ in range(3):
        grad = torch.randn_like(own)
        own.grad, projection.weight.grad = grad.clone(), grad.clone()
        theirs.step()
        ours.step(1.0)
    # torch iterates in bf16
    assert (own - projection.weight).norm() / own.norm() < 2e-2


def test_every_trained_parameter_moves_and_the_routers_bias_does_not():
    torch.manual_seed(0)
    model = build_model(CONFIG)
    balancer = QuantileBalancer(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = NanoOptimizer(model, Rates())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        frozen = name.endswith("e_score_correction_bias")
        assert torch.equal(parameter, before[name]) == frozen, name
    assert len(balancer.routers) == 5


def test_balancing_spreads_a_crowded_router():
    torch.manual_seed(0)
    model = build_model(CONFIG)
    balancer = QuantileBalancer(model, smoothing=0.0)
    router = balancer.routers[0]
    with torch.no_grad():
        # every token prefers the same few experts
        router.weight += 0.3 * torch.linspace(0, 1, 32)[:, None]
    x_BTD = torch.randn(4, 500, 192) + 0.3
    others = torch.randn(4, 500, 192)

    def largest_load() -> float:
        balancer.counted = torch.ones(4, 500, dtype=torch.bool)
        counts = router(x_BTD).expert_ids.flatten().bincount(minlength=32)
        for other in balancer.routers[1:]:
            other(others)
        return counts.max().item() / (x_BTD.shape[0] * x_BTD.shape[1] * 4 / 32)

    crowded = largest_load()
    for _ in range(5):
        balancer.step()
        balanced = largest_load()
    assert crowded > 3
    assert balanced < 1.5
    assert abs(router.e_score_correction_bias.mean()) < 1e-6
