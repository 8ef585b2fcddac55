"""Precision belongs to the model: what would change it is refused, and a step leaves it alone."""

from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.nn import functional as F
from trl import SFTConfig

from checkpoints import ODD_SHAPES, build_checkpoint
from closeness import relative_l2
from k3tune.arguments import (
    DataArguments,
    LoraArguments,
    ModelArguments,
    ParallelArguments,
    RunArguments,
)
from k3tune.errors import ConfigError
from k3tune.lora.fingerprint import base_fingerprint
from k3tune.model import load_base
from k3tune.model.latent_moe import Router
from k3tune.train import K3SFTTrainer, build_datasets, build_model, load_tokenizer, parse_options
from k3tune.train.setup import DTYPES
from k3tune.train.trainer import check_deepspeed
from tiny_run import adapted, add_tokenizer, make_trainer, rows

F32_NAMES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
# What makes a shipped config small enough for a test, and keeps the rest of it.
SMALL = [
    *("--max_steps", "1", "--gradient_accumulation_steps", "1", "--thinking_effort", "none"),
    *("--save_strategy", "no", "--use_cpu", "true", "--disable_tqdm", "true"),
    *("--expert_parallel_size", "1", "--trunk_shard", "none"),
]


@pytest.mark.parametrize("name", ["nano_sft", "k3_sft"])
def test_a_step_of_each_shipped_config_keeps_f32_in_f32(
    base_folder, samples_file, repository, tmp_path, name
):
    kinds = (ModelArguments, LoraArguments, DataArguments, ParallelArguments, RunArguments)
    flags = ["--config", str(repository / "recipes" / "configs" / f"{name}.yaml")]
    flags += ["--base", str(base_folder), "--train_path", str(samples_file)]
    flags += ["--output_dir", str(tmp_path), *SMALL]
    model_options, lora, data, _, _, training = parse_options((*kinds, SFTConfig), flags)
    dtype = DTYPES[model_options.dtype]
    tokenizer = load_tokenizer(model_options)
    model = build_model(model_options, lora, training)
    seen = record_routers(model)
    train, held_out = build_datasets(data, tokenizer, training)
    trainer = K3SFTTrainer(model, training, train, held_out, processing_class=tokenizer)
    trainer.train()

    assert seen and all(weights.dtype == torch.float32 for _, weights, _ in seen)
    for x, weights, again in seen:
        assert x.dtype == dtype
        assert torch.equal(weights, again)
    untouched = load_base(base_folder, dtype=dtype)
    assert base_fingerprint(model) == base_fingerprint(untouched)
    found = [
        (n, p) for n, p in model.named_parameters() if n.endswith(F32_NAMES) and "lora" not in n
    ]
    assert len({n.rsplit(".", 2)[-2] if "conv" in n else n.rsplit(".")[-1] for n, _ in found}) >= 5
    assert all(parameter.dtype == torch.float32 for _, parameter in found)
    for parameter_name, parameter in model.named_parameters():
        is_factor = ".lora_A." in parameter_name or ".lora_B." in parameter_name
        assert parameter.requires_grad == is_factor
        assert is_factor or parameter.grad is None
        assert not is_factor or parameter.dtype == torch.float32


def record_routers(model):
    """Input, weights and, computed here in fp32, the weights again, of every router's call."""
    seen = []

    def record(router, inputs, routing):
        (x, *_) = inputs
        scores = F.linear(x.float(), router.weight.float()).sigmoid()
        weights = scores.gather(-1, routing.expert_ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
        seen.append((x.detach(), routing.expert_weights.detach(), weights.detach()))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(record)
    return seen


@pytest.mark.parametrize("options", [{"bf16": True}, {"bf16": None}, {"fp16": True}])
def test_autocast_is_refused_with_the_reason(base_folder, tmp_path, options):
    with pytest.raises(ConfigError, match=r"(bf16|fp16) is True, expected false: autocast would"):
        make_trainer(base_folder, tmp_path, **{"bf16": False, **options})


def test_a_launchers_mixed_precision_is_refused(base_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="mixed_precision is 'bf16', expected 'no'"):
        make_trainer(base_folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("save_only_model", True, "cannot be resumed"),
        ("ignore_data_skip", True, "see samples twice"),
        ("push_to_hub", True, "upload output_dir/adapter"),
        ("auto_find_batch_size", True, "not be the one its config describes"),
        ("average_tokens_across_devices", False, "weigh more"),
        ("accelerator_config", {"use_seedable_sampler": False}, "depend on the seed alone"),
        ("use_liger_kernel", True, "kernels of its own"),
        ("bf16_full_eval", True, "autocast would"),
        ("max_length", None, "expected an integer of at least 1"),
        ("loss_type", "x", "expected one of nll, dft"),
        ("packing_strategy", "wrapped", "would not be read: k3tune.data packs whole samples"),
        ("assistant_only_loss", True, "would not be read"),
        ("chat_template_path", "chat.jinja", "rendered by k3tune.data"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(
    base_folder, tmp_path, name, value, reason
):
    with pytest.raises(ConfigError, match=f"{name}.* is .*{reason}"):
        make_trainer(base_folder, tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("stage", "config", "message"),
    [
        (3, {}, "zero_stage is 3, expected 1 or 2: stage 3 would gather the packed experts"),
        (0, {}, "zero_stage is 0, expected 1 or 2"),
        (2, {"bf16": {"enabled": True}}, "bf16.enabled is True, expected false: autocast would"),
        (1, {"optimizer": {"type": "AdamW"}}, "has an 'optimizer' section, expected none"),
        (
            2,
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device is 'cpu', expected none",
        ),
    ],
)
def test_deepspeed_configs_that_do_not_fit_are_refused(stage, config, message):
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    with pytest.raises(ConfigError, match=message):
        check_deepspeed(plugin)


@pytest.mark.parametrize("file", ["zero2", "cpu2", "single"])
def test_shipped_launch_files_leave_precision_to_the_model(repository, file):
    content = yaml.safe_load((repository / f"recipes/accelerate/{file}.yaml").read_text())
    assert content["mixed_precision"] == "no"
    stage = content.get("deepspeed_config", {}).get("zero_stage", 1)
    check_deepspeed(SimpleNamespace(zero_stage=stage, deepspeed_config={}))


def test_optimizers_that_bring_their_own_parameters_are_refused(base_folder, tmp_path):
    trainer = make_trainer(base_folder, tmp_path)
    trainer.get_optimizer_cls_and_kwargs = lambda *_: (torch.optim.SGD, {"optimizer_dict": {}})
    with pytest.raises(ConfigError, match="expected one that steps over parameter groups"):
        trainer.create_optimizer()


def test_rows_that_are_not_tokenised_are_refused(base_folder, tmp_path):
    with pytest.raises(ConfigError, match="expected labels too: tokenise it"):
        make_trainer(base_folder, tmp_path, rows().remove_columns("labels"))
    with pytest.raises(ConfigError, match=r"expected seq_lengths too: .* and pack it"):
        make_trainer(base_folder, tmp_path, packing=True)


def test_a_bf16_base_trains_nearly_as_the_fp32_one(base_folder, tmp_path):
    """The 16-bit trunk costs rounding, not a different loss: 2^-8 a value, averaged over tokens."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = adapted(base_folder, dtype=dtype)
        trainer = make_trainer(base_folder, tmp_path / str(dtype), model=model)
        trainer.train()
        losses.append(torch.tensor([r["loss"] for r in trainer.state.log_history if "loss" in r]))
    assert relative_l2(losses[1], losses[0]) < 2e-2


def test_any_shape_of_k3_trains(tmp_path):
    shape = ODD_SHAPES["three_heads_seven_experts"]
    base = add_tokenizer(build_checkpoint(tmp_path / "base", vocab_size=300, **shape))
    trainer = make_trainer(base, tmp_path / "run", max_steps=3)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < losses[0]
