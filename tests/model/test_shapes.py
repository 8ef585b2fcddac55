"""Nothing depends on the goldens' sizes: odd shapes agree with a second implementation."""

from pathlib import Path

import pytest
import torch

from checkpoints import build_checkpoint
from independent_k3 import IndependentK3
from k3tune.model import K3ForCausalLM, load_base

SHAPES = {
    "five heads, seven experts": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "kda_num_heads": 3,
        "kda_head_dim": 20,
        "num_experts": 7,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "hidden_size": 72,
    },
    "three MLA layers, block of four": {
        "num_hidden_layers": 9,
        "mla_layers": [2, 5, 8],
        "attn_res_block_size": 4,
        "num_shared_experts": 2,
        "num_experts": 10,
        "num_experts_per_token": 4,
    },
    "weak decay, scaled routing, one expert a token": {
        "kda_gate_lower_bound": -0.5,
        "routed_scaling_factor": 2.5,
        "num_experts": 3,
        "num_experts_per_token": 1,
        "attn_res_block_size": 1,
    },
    "a convolution of one tap, no dense layer": {
        "short_conv_kernel_size": 1,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 0,
    },
    "two dense layers, MLA first": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "mla_layers": [0, 3],
        "mla_norm_eps": 1e-3,
        "attn_res_block_size": 12,
    },
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    return build_checkpoint(folder, seed=3, **SHAPES[request.param])


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> K3ForCausalLM:
    return load_base(checkpoint, dtype=torch.float64)


@torch.no_grad()
def test_logits_agree_with_a_second_implementation(checkpoint, model):
    ids = torch.randint(0, model.model.architecture.vocab_size, (1, 19))
    expected = IndependentK3(checkpoint).logits(ids[0].tolist())
    assert (model(ids).logits[0] - expected).abs().max() <= 1e-10
    single = load_base(checkpoint, dtype=torch.float32)(ids).logits[0]
    assert (single - expected).abs().max() <= 3e-4 * expected.abs().max()


@torch.no_grad()
def test_decoding_equals_the_full_pass(model):
    ids = torch.randint(0, model.model.architecture.vocab_size, (2, 12))
    output = model(ids[:, :5], use_cache=True)
    logits = [output.logits]
    for t in range(5, 12):
        output = model(ids[:, t : t + 1], past_key_values=output.past_key_values)
        logits.append(output.logits)
    assert (torch.cat(logits, 1) - model(ids).logits).abs().max() <= 1e-10
