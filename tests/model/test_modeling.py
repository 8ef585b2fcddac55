"""The model's contract: loss, logits, routing, names, what it refuses."""

import json

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from k3tune.errors import ConfigError
from k3tune.model import K3Config, K3ForCausalLM, load_base
from k3tune.model.latent_moe import PackedProjection
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy


@pytest.fixture(scope="module")
def model(fixtures):
    return load_base(fixtures / "k3_tiny", dtype=torch.float32)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 316, (2, 11), generator=torch.Generator().manual_seed(1))


def expected_loss(model, ids, labels) -> torch.Tensor:
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def test_labels_give_the_mean_next_token_loss_and_no_logits(model, ids):
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    assert output.logits is None and output.past_key_values is None
    targets = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(output.loss, expected_loss(model, ids, labels) / targets)


@torch.no_grad()
def test_num_items_in_batch_divides_the_summed_loss(model, ids):
    total = expected_loss(model, ids, ids)
    for count in (100, torch.tensor(100)):
        loss = model(ids, labels=ids, num_items_in_batch=count).loss
        torch.testing.assert_close(loss, total / 100)


@torch.no_grad()
def test_return_logits_gives_both(model, ids):
    output = model(ids, labels=ids, return_logits=True)
    assert output.loss is not None
    assert torch.equal(output.logits, model(ids).logits)


@torch.no_grad()
def test_logits_to_keep_takes_a_count_or_positions(model, ids):
    logits = model(ids).logits
    assert torch.allclose(model(ids, logits_to_keep=3).logits, logits[:, -3:], atol=1e-5)
    kept = torch.tensor([0, 4, 5])
    assert torch.allclose(model(ids, logits_to_keep=kept).logits, logits[:, kept], atol=1e-5)


@torch.no_grad()
def test_the_loss_never_holds_more_than_a_chunk_of_logits(model, monkeypatch, ids):
    seen = []

    def recorded(hidden, weight, targets, **options):
        seen.append((hidden.shape, options))
        return linear_cross_entropy(hidden, weight, targets, **options)

    monkeypatch.setattr("k3tune.model.modeling.linear_cross_entropy", recorded)
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head made all logits"))
    model(ids, labels=ids)
    model.lm_head._forward_hooks.clear()
    assert len(seen) == 1


@torch.no_grad()
def test_replay_recomputes_the_weights_from_the_unbiased_scores(model, ids):
    free = model(ids, output_routing=True)
    assert list(free.routing) == [1, 2, 3, 4, 5]
    same = model(ids, routing={layer: r.expert_ids for layer, r in free.routing.items()})
    assert torch.equal(same.logits, free.logits)
    other = {layer: (r.expert_ids + 1) % 16 for layer, r in free.routing.items()}
    output = model(ids, routing=other, output_routing=True)
    for layer, (expert_ids, weights) in output.routing.items():
        assert torch.equal(expert_ids, other[layer])
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert not torch.equal(output.logits, free.logits)


@torch.no_grad()
def test_local_experts_are_the_matching_part_of_the_whole(fixtures, ids):
    moe = load_base(fixtures / "k3_tiny", dtype=torch.float64).model.layers[2].block_sparse_moe
    latent = torch.randn(9, 64, dtype=torch.float64)
    expert_ids = torch.stack([torch.randperm(16)[:4] for _ in range(9)])
    weights = torch.rand(9, 4, dtype=torch.float64)
    whole = moe.experts(latent, expert_ids, weights)
    parts = 0
    for experts in ([3, 1, 15], [0, 2], sorted({*range(16)} - {0, 1, 2, 3, 15})):
        part = load_base(fixtures / "k3_tiny", dtype=torch.float64, experts=experts)
        parts = parts + part.model.layers[2].block_sparse_moe.experts(latent, expert_ids, weights)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "either input_ids or inputs_embeds"),
        (
            {"input_ids": torch.zeros(5, dtype=torch.long)},
            r"shape \(5,\), expected \(batch, tokens\)",
        ),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "at least one token"),
        ({"routing": {1: torch.zeros(2, 11, 4)}}, r"names layers \[1\], expected"),
        ({"past_key_values": ()}, "is a tuple, expected the K3Cache"),
        ({"position_ids": torch.zeros(2, 8)}, r"position_ids has shape \(2, 8\)"),
        ({"attention_mask": torch.ones(2, 7)}, r"shape \(2, 7\), expected \(2, 11\)"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, "1 for each token and 0 for padding"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 22]), "cu_seq_lens_k": torch.tensor([0, 11, 22])},
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
    ],
)
def test_contradicting_inputs_are_refused_in_a_sentence(model, ids, options, sentence):
    if options:
        options = {"input_ids": ids, **options}
    with pytest.raises(ValueError, match=sentence):
        model(**options)


def test_images_are_refused_in_a_sentence(model, ids):
    with pytest.raises(NotImplementedError, match="text model only"):
        model(ids, pixel_values=torch.zeros(1))


def test_what_the_model_does_not_keep_is_refused_in_a_sentence(model, ids):
    model(ids, output_attentions=False, output_hidden_states=None)
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(NotImplementedError, match="or put hooks on"):
            model(ids, **{name: True})


def test_an_option_nobody_knows_is_an_error(model, ids):
    with pytest.raises(TypeError, match="output_router_logits"):
        model(ids, output_router_logits=True)


def test_return_dict_false_gives_a_tuple(model, ids):
    output = model(ids, labels=ids, return_dict=False)
    assert isinstance(output, tuple) and output[0].shape == ()


def test_padding_after_cached_tokens_is_refused(model, ids):
    cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(2, 13)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="padding belongs before"):
        model(ids[:, :2], attention_mask=mask, past_key_values=cache)


def test_from_pretrained_points_to_load_base(fixtures):
    with pytest.raises(NotImplementedError, match=r"k3tune\.load_base"):
        K3ForCausalLM.from_pretrained(fixtures / "k3_tiny")


def test_config_round_trips_and_keeps_unknown_fields(fixtures, tmp_path):
    published = json.loads((fixtures / "published_config.json").read_text())
    config = K3Config(**published)
    config.save_pretrained(tmp_path)
    again = K3Config.from_pretrained(tmp_path)
    assert again.architecture == config.architecture
    assert again.model_type == "kimi_k3" and again.text_config.model_type == "kimi_k3_text"
    kept = {"model_type", "architectures", "dtype", "transformers_version"}
    defaults = {
        "min_length",
        "max_length",
        "do_sample",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
    }
    for name, value in published["text_config"].items():
        if name not in kept | defaults:
            assert getattr(again.text_config, name, None) == value, name
    assert again.vision_config == published["vision_config"]


def test_the_published_config_builds_on_the_meta_device(fixtures):
    config = K3Config.from_pretrained(fixtures / "published_config.json")
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    projections = [m for m in model.modules() if isinstance(m, PackedProjection)]
    assert len(projections) == 3 * 92
    packed = sum(p.packed.numel() for p in projections)
    # each packed byte is two parameters, scales none; A_log is 96 long here, 128 in the file
    others = sum(p.numel() for p in model.parameters() if p.dtype != torch.uint8)
    assert 2 * packed + others + 69 * 32 == 2_779_484_478_208


def test_an_unusable_config_is_refused_by_name(fixtures):
    text = json.loads((fixtures / "k3_tiny" / "config.json").read_text())["text_config"]
    with pytest.raises(ConfigError, match="hidden_act is 'silu', expected 'situ'"):
        K3ForCausalLM(K3Config(text_config={**text, "hidden_act": "silu"}))
    native = {"model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=r"routed_expert_hidden_size.*not K3"):
        K3ForCausalLM(K3Config(text_config=native))


def test_a_model_built_without_a_checkpoint_has_usable_random_weights(fixtures, ids):
    config = K3Config.from_pretrained(fixtures / "k3_tiny")
    output = K3ForCausalLM(config)(ids, labels=ids)
    assert torch.isfinite(output.loss)
    assert abs(output.loss.item() - torch.tensor(320.0).log().item()) < 1.0


def test_replayed_experts_no_router_could_choose_are_refused(model, ids):
    free = model(ids, output_routing=True).routing
    given = {layer: used.expert_ids for layer, used in free.items()}
    plain = {layer: tuple(used) for layer, used in free.items()}
    assert torch.equal(model(ids, routing=plain).logits, model(ids).logits)
    for wrong, sentence in (
        (given[2] + 100, r"holds ids from .*, expected different experts of 0\.\.15"),
        (torch.zeros_like(given[2]), "different experts"),
        (given[2].float(), r"is torch\.float32 of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(ids, routing={**given, 2: wrong})


def test_labels_without_a_target_are_refused(model, ids):
    for labels in (torch.full_like(ids, -100), ids[:, :1]):
        with pytest.raises(ValueError, match="hold no target"):
            model(ids[:, : labels.shape[1]], labels=labels)


def test_embeddings_of_another_dtype_or_width_are_refused(model, ids):
    embedded = model.model.embed_tokens(ids)
    for wrong in (embedded.double(), embedded[..., :5]):
        with pytest.raises(
            ValueError, match=r"inputs_embeds is .* expected torch\.float32 of width"
        ):
            model(inputs_embeds=wrong)


def test_activation_checkpointing_and_a_cache_exclude_each_other(fixtures, ids):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float32)
    cache = model(ids, use_cache=True).past_key_values
    model.train()
    model.gradient_checkpointing_enable()
    for options in ({"past_key_values": cache}, {"use_cache": True}):
        with pytest.raises(ValueError, match="cannot fill a cache"):
            model(ids, **options)
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == ids.shape[1]


def test_the_configs_use_cache_is_heard(fixtures, ids):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float32)
    assert model(ids).past_key_values is not None
    model.config.use_cache = False
    assert model(ids).past_key_values is None


def test_an_adapter_on_the_head_is_refused_where_it_would_be_skipped(fixtures, ids):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float32)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(NotImplementedError, match="an adapter wraps lm_head"):
        model(ids, labels=ids)


def test_the_text_config_alone_is_no_config_of_the_model(fixtures):
    config = K3Config.from_pretrained(fixtures / "k3_tiny")
    with pytest.raises(ConfigError, match="expected the whole K3Config"):
        K3ForCausalLM(config.text_config)


def test_the_plain_trainer_evaluates(model, ids, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    metrics = Trainer(model, arguments, eval_dataset=rows).evaluate()
    assert metrics["eval_loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
