"""One layer's experts over two processes: outputs, gradients, and the bytes that cross."""

import json

import layer_runs
import pytest
import torch
from layer_runs import ACTIVE, NUM_EXPERTS, OPTIONS, PLACED, TOKENS
from safetensors.torch import load_file

from closeness import relative_l2
from k3tune.parallel.shards import ExpertShards, layer_traffic
from k3tune.quant.mxfp8 import round_mxfp8_straight_through

LATENT = layer_runs.architecture().routed_expert_hidden_size
HIDDEN = layer_runs.architecture().hidden_size


@pytest.fixture(scope="module")
def results(two):
    """Tensors by option and rank."""
    return {
        (name, rank): load_file(two / f"layer.{name}-{rank}") for name in OPTIONS for rank in (0, 1)
    }


def alone(rank: int, tokens: str, *, rounded: bool = False) -> dict[str, torch.Tensor]:
    """What one process with all experts computes for a rank's tokens."""
    experts = layer_runs.routed_experts(range(NUM_EXPERTS))
    z, ids, weights = layer_runs.inputs(rank)[tokens]
    z.requires_grad_(), weights.requires_grad_()
    out = experts(round_mxfp8_straight_through(z) if rounded else z, ids, weights)
    (out * layer_runs.direction(out)).sum().backward()
    return {"out": out.detach(), "z": z.grad, "weights": weights.grad}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_spread_experts_compute_what_one_process_does(results, name, tokens):
    for rank in (0, 1):
        expected = alone(rank, tokens, rounded=name == "mxfp8")
        for key, value in expected.items():
            actual = results[name, rank][f"{tokens}.{key}"]
            assert actual.shape == value.shape
            assert relative_l2(actual, value) < 1e-6, (rank, key)


@pytest.mark.parametrize("tokens", TOKENS)
def test_no_bit_of_an_output_depends_on_where_experts_are_or_how_tokens_travel(results, tokens):
    for rank in (0, 1):
        expected = results["contiguous", rank][f"{tokens}.out"]
        for name in ("placed", "deduplicated"):
            assert torch.equal(results[name, rank][f"{tokens}.out"], expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_are_as_computed(results, name, tokens):
    """Of both processes together: what one sends back is what it got."""
    shards = ExpertShards(NUM_EXPERTS, 2, PLACED if name == "placed" else {})
    options = OPTIONS[name]
    ids = torch.cat([layer_runs.inputs(rank)[tokens][1] for rank in (0, 1)])
    ranks = [{shards.ranks(0)[expert] for expert in row} for row in ids.tolist()]
    traffic = layer_traffic(
        shards,
        latent=LATENT,
        value_bytes=4,
        rows=ids.numel(),
        unique_rows=sum(map(len, ranks)) if options.deduplicate else None,
        mxfp8=options.mxfp8,
    )
    expected = [2 * traffic.counts, traffic.dispatch, traffic.combine, traffic.gradients]
    found = sum(results[name, rank][f"{tokens}.sent"] for rank in (0, 1))
    assert found.tolist() == expected


def test_a_token_costs_k_latents_each_way(results):
    tokens = sum(TOKENS["some"])
    sent = {n: sum(results[n, rank]["some.sent"] for rank in (0, 1)).tolist() for n in OPTIONS}
    _, dispatch, combine, gradient = sent["contiguous"]
    assert dispatch == combine == tokens * ACTIVE * LATENT * 4
    assert gradient == 2 * dispatch
    assert sent["placed"] == sent["contiguous"]
    assert sent["deduplicated"][1] < dispatch
    assert sent["mxfp8"][1] == tokens * ACTIVE * (LATENT + LATENT // 32)


def test_the_full_width_never_crosses(two):
    assert HIDDEN != LATENT
    for name in OPTIONS:
        for rank in (0, 1):
            widths = json.loads((two / f"layer.{name}.json-{rank}").read_text())
            floating = {width for dtype, width in widths if dtype == "torch.float32"}
            assert floating <= {0, LATENT}
            assert HIDDEN not in {width for _, width in widths}
