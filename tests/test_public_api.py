"""The public names are frozen: adding or dropping one is a decision, made here."""

import importlib

import pytest

import k3tune

PUBLIC = {
    "k3tune": ["__version__", "load_adapter", "load_base"],
    "k3tune.data": ["K3Tokenizer", "pack", "render_chat"],
    "k3tune.lora": [
        "LoraSpec",
        "adapter_gradients",
        "adapter_parameters",
        "adapter_state",
        "attach_lora",
        "disable_adapter",
        "export_adapter",
        "import_adapter",
        "load_adapter",
        "save_adapter",
        "verify",
    ],
    "k3tune.model": ["K3Config", "K3ForCausalLM", "load_base"],
    "k3tune.monitor": ["Floor", "FloorMonitor", "mismatch"],
    "k3tune.plan": ["plan"],
    "k3tune.quant": ["MXFP4Tensor", "dequantize", "pack", "quantize", "unpack"],
    "k3tune.rl": [
        "K3GRPOTrainer",
        "Rollout",
        "RolloutEngine",
        "Sampling",
        "build_engine",
        "build_prompts",
        "build_rewards",
        "describe_grpo",
        "trainer_class",
    ],
    "k3tune.rl.engines": ["ContinuousSampler", "LocalEngine", "SampledToken"],
    "k3tune.train": [
        "K3SFTTrainer",
        "build_datasets",
        "build_model",
        "describe_run",
        "load_tokenizer",
        "parse_options",
        "prepare_launch",
        "run_recipe",
    ],
    "k3tune_kernels.attention_residual": ["attention_residual"],
    "k3tune_kernels.kda_rule": ["kda_rule"],
    "k3tune_kernels.kda_step": ["KdaConstants", "KdaInputs", "kda_step"],
    "k3tune_kernels.latent_attention": ["latent_attention"],
    "k3tune_kernels.linear_cross_entropy": ["linear_cross_entropy"],
    "k3tune_kernels.moe_lora": ["LoraFactors", "MoELora", "PackedWeight", "Situ", "moe_lora"],
    "k3tune_kernels.mxfp8": ["GROUP_SIZE", "decode", "encode", "round_mxfp8"],
    "k3tune_kernels.mxfp4": ["GROUP_SIZE", "decode", "encode"],
    "k3tune_kernels.rms_norm": ["gated_rms_norm", "rms_norm"],
    "k3tune_kernels.short_convolution": ["short_convolution"],
    "k3tune_kernels.situ_glu": ["situ_glu"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_frozen_ones(module):
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_resolve_and_are_listed(module):
    package = importlib.import_module(module)
    for name in PUBLIC[module]:
        assert getattr(package, name) is not None
        assert name in dir(package)


def test_every_package_is_frozen(repository):
    packages = {
        ".".join(init.parent.relative_to(root).parts)
        for root in (repository, repository / "kernels")
        for init in root.glob("k3tune*/**/__init__.py")
    }
    # these offer their modules, and no names of their own
    inside = {"k3tune.commands", "k3tune.lora.export", "k3tune.published"}
    inside |= {"k3tune.doctor", "k3tune.parallel", "k3tune.report", "k3tune.serve"}
    inside |= {"k3tune_kernels", "k3tune_kernels.cpu"}
    assert packages - inside == set(PUBLIC)


def test_subpackages_resolve_as_attributes():
    assert k3tune.model.K3Config.model_type == "kimi_k3"
    assert callable(k3tune.quant.dequantize)


def test_both_doors_lead_to_the_same_loader():
    assert k3tune.load_base is k3tune.model.load_base


@pytest.mark.parametrize("module", ["k3tune", "k3tune.model", "k3tune.quant"])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'merge_adapter'"):
        _ = importlib.import_module(module).merge_adapter
