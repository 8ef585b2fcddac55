"""PEFT itself, over plain linear layers of K3's names, reads what is exported for it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from k3tune.lora import attach_lora, export_adapter, save_adapter
from k3tune.lora.modules import module_shapes
from k3tune.model import load_base
from k3tune.published.architecture import parse_config, read_config


class Tree(nn.Module):
    """Every adaptable module as an ``nn.Linear``, the experts one by one."""

    def __init__(self, folder):
        super().__init__()
        for name, shape in module_shapes(parse_config(read_config(folder))).items():
            stack, _, leaf = name.rpartition(".")
            numbers = [""] if shape.num_experts is None else range(shape.num_experts)
            for number in numbers:
                path = f"language_model.{stack}.{number}.{leaf}".replace("..", ".")
                self.put(path, nn.Linear(shape.in_features, shape.out_features, bias=False))

    def put(self, path, linear):
        module, *parents = self, *path.split(".")[:-1]
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.add_module(path.rpartition(".")[2], linear)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layers": [1]},
        {"targets": ["experts"], "layers": [2], "rank_pattern": {"w2": 3}},
        {"rank_pattern": {r"layers\.2\..*w1": 4, "o_proj": 5}, "use_rslora": True},
        {"alpha_pattern": {r"layers\.1\..*w3": 5, "q_a_proj": 2}},
    ],
    ids=["plain", "one layer", "experts of one layer", "ranks and rslora", "alphas"],
)
@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
def test_peft_finds_every_module_with_its_rank_and_scale(
    folder, spec, randomise, tmp_path, form, fields
):
    options = {"targets": ["attention", "experts", "shared_experts"], "form": form, **fields}
    model = randomise(attach_lora(load_base(folder, dtype=torch.float32), spec(**options)))
    scales = {
        name: module.scaling["default"]
        for name, module in model.base_model.model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    source = save_adapter(model, tmp_path / "trained")
    out = export_adapter(source, tmp_path / "out", format="peft", base=folder).path
    config = LoraConfig.from_pretrained(out)
    # the wrapper for causal models wants a model that generates
    config.task_type = None
    peft_model = get_peft_model(Tree(folder), config)
    tensors = load_file(out / "adapter_model.safetensors")
    result = set_peft_model_state_dict(peft_model, tensors)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key]
    for key, value in tensors.items():
        path, _, half = key.removesuffix(".weight").rpartition(".lora_")
        layer = peft_model.get_submodule(path)
        assert torch.equal(getattr(layer, f"lora_{half}")["default"].weight, value.float())
        stack, _, leaf = path.removeprefix("base_model.model.language_model.").rpartition(".")
        module = f"{stack.rstrip('0123456789').rstrip('.')}.{leaf}"
        assert layer.scaling["default"] == pytest.approx(scales[module], rel=1e-12)
