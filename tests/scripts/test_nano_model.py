"""k3-nano's fake-quantised experts, and the checkpoint they are stored as."""

import pytest
import torch

import k3tune
from closeness import assert_close
from k3tune.data.chat import NO_TARGET
from k3tune.data.tokenizer import K3Tokenizer, write_tokenizer
from k3tune.published.architecture import parse_config
from k3tune_kernels.moe_lora import Situ, moe_lora
from k3tune_kernels.mxfp4 import decode, encode
from nano_corpus import SPECIAL_TOKENS, Mix, pieces
from nano_model import TrainableExperts, build_model, nano_config, round_to_mxfp4, write_base
from nano_optimizer import Rates
from pretrain_nano import Plan, Training, make_batches, pretrain

CONFIG = nano_config({"bos_token_id": 368, "eos_token_id": 370, "pad_token_id": 383})
SMALL = Plan(steps=4, documents=4, seed=1, mix=Mix(effort_period=3), rates=Rates())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> K3Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, pieces(), SPECIAL_TOKENS)
    return K3Tokenizer.from_pretrained(folder)


def test_fake_quantisation_is_the_codecs_round_trip():
    torch.manual_seed(0)
    weight = torch.randn(3, 64, 96) * torch.logspace(-4, 4, 64)[:, None]
    # ties, the ends of the grid, an all-zero group
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[0, 0, :8], weight[0, 0, 8:16], weight[0, 1] = grid, -grid, 0.0
    expected = decode(*encode(weight, scale_rule="ceil"), torch.float32)
    assert torch.equal(round_to_mxfp4(weight), expected)


def test_trainable_experts_compute_what_the_packed_ones_do():
    torch.manual_seed(0)
    experts = TrainableExperts(parse_config(CONFIG))
    for weight in experts.parameters():
        weight.data.normal_(std=0.1)
    z, weights = torch.randn(100, 96), torch.rand(100, 4)
    ids = torch.rand(100, 32).topk(4).indices
    # an expert without tokens
    ids[ids == 5] = 31
    packed = [encode(w.detach(), scale_rule="ceil") for w in (experts.w1, experts.w3, experts.w2)]
    expected = moe_lora(z, ids, weights, *packed, situ=Situ(4.0, 25.0), backend="reference")
    assert_close("experts", experts(z, ids, weights), expected, max_rel=1e-4, rms_rel=1e-5)


def test_gradients_pass_straight_through_the_rounding():
    torch.manual_seed(0)
    experts = TrainableExperts(parse_config(CONFIG))
    for weight in experts.parameters():
        weight.data.normal_(std=0.1)
    z, weights = torch.randn(20, 96, requires_grad=True), torch.rand(20, 4)
    ids = torch.rand(20, 32).topk(4).indices
    grads = torch.autograd.grad(experts(z, ids, weights).square().sum(), [z, *experts.parameters()])
    w1, w3, w2 = (round_to_mxfp4(w.detach()).requires_grad_() for w in experts.parameters())
    out = torch.zeros(20, 96)
    for a in range(4):
        gate, up = (torch.einsum("nl,nfl->nf", z, w[ids[:, a]]) for w in (w1, w3))
        hidden = 4 * torch.tanh(gate / 4) * gate.sigmoid() * 25 * torch.tanh(up / 25)
        out = out + weights[:, a, None] * torch.einsum("nf,nlf->nl", hidden, w2[ids[:, a]])
    expected = torch.autograd.grad(out.square().sum(), [z, w1, w3, w2])
    for name, grad, other in zip(("z", "w1", "w3", "w2"), grads, expected, strict=True):
        assert_close(name, grad, other, max_rel=1e-3, rms_rel=1e-4)


def test_the_stored_base_computes_what_the_training_model_does(tmp_path):
    torch.manual_seed(0)
    model = build_model(CONFIG).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # the file keeps the trunk in bf16: what is already rounded is stored exactly
            if ".experts." not in name:
                parameter.copy_(parameter.bfloat16())
        model.model.layers[0].self_attn.A_log.uniform_(-1, 1)
        model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias.normal_(std=0.1)
        write_base(model, CONFIG, tmp_path)
        ids = torch.randint(0, 384, (2, 50))
        stored = k3tune.load_base(tmp_path, dtype=torch.float32)
        assert_close(
            "logits",
            stored(input_ids=ids).logits,
            model(input_ids=ids).logits,
            max_rel=1e-3,
            rms_rel=1e-4,
        )


def test_a_row_is_filled_up_with_tokens_that_nothing_is_trained_on(tokenizer):
    documents = Training(SMALL, tokenizer).corpus.step(0, 9)
    batches = make_batches(documents)
    assert sum(len(batch.ids) for batch in batches) == 9
    rows = [
        (ids[real].tolist(), labels[real].tolist())
        for batch in batches
        for ids, labels, real in zip(*batch, strict=True)
    ]
    assert sorted(rows) == sorted((d.input_ids, d.labels) for d in documents)
    for batch in batches:
        assert (batch.labels[~batch.real] == NO_TARGET).all()
        assert batch.ids.min() >= 0 and batch.ids.max() < 384


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tokenizer, tmp_path):
    straight = Training(SMALL, tokenizer)
    losses = [straight.step() for _ in range(4)]
    first = Training(SMALL, tokenizer)
    assert [first.step() for _ in range(2)] == losses[:2]
    first.save(tmp_path / "state.safetensors")
    second = Training(SMALL, tokenizer)
    second.resume(tmp_path / "state.safetensors")
    assert [second.step() for _ in range(2)] == losses[2:]
    assert second.progress[:2] == straight.progress[:2]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_a_state_of_another_plan_is_refused(tokenizer, tmp_path):
    Training(SMALL, tokenizer).save(tmp_path / "state.safetensors")
    other = Training(SMALL._replace(seed=2), tokenizer)
    with pytest.raises(ValueError, match="saved by another plan"):
        other.resume(tmp_path / "state.safetensors")


def test_pretraining_writes_a_base_and_nothing_else(tmp_path):
    training = pretrain(SMALL, tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    names = {path.name for path in (tmp_path / "base").iterdir()}
    shards = {f"model-{number:05d}-of-000007.safetensors" for number in range(1, 8)}
    assert names == shards | {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }
    assert training.progress.steps == 4
    model = k3tune.load_base(tmp_path / "base", dtype=torch.float32)
    assert model.generation_config.eos_token_id == 370
