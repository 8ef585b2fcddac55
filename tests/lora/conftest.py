"""A small base with nothing equal to anything else, and adapters for it."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import build_checkpoint
from k3tune.lora import LoraSpec, adapter_parameters
from k3tune.model import K3ForCausalLM, load_base

ALL = ("attention", "latent", "experts", "shared_experts", "dense")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: dense KDA, KDA, MLA; five experts, two active."""
    return build_checkpoint(
        tmp_path_factory.mktemp("base"),
        num_hidden_layers=3,
        hidden_size=48,
        num_experts=5,
        moe_intermediate_size=64,
        vocab_size=96,
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory's copy; it is made once for all tests that ask with the same arguments."""
    made: dict[str, Path] = {}

    def copy(make: Callable[[Path], Any], target: Path, **arguments: Any) -> Path:
        key = repr((target.name, arguments))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("made") / target.name
            make(made[key])
        return shutil.copytree(made[key], target)

    return copy


@pytest.fixture
def base(folder: Path) -> K3ForCausalLM:
    return load_base(folder, dtype=torch.float32, kernels="reference")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 90, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def spec() -> Callable[..., LoraSpec]:
    """A spec of everything; arguments replace fields."""

    def make(**fields: Any) -> LoraSpec:
        return LoraSpec(**{"targets": ALL, "rank": 2, "alpha": 6, **fields})

    return make


@pytest.fixture
def randomise() -> Callable[[PeftModel], PeftModel]:
    """Fill an adapter with noise, so that it matters."""

    def fill(model: PeftModel, adapter_name: str | None = None) -> PeftModel:
        with torch.no_grad():
            for group in adapter_parameters(model, adapter_name).values():
                for factor in group.values():
                    factor.normal_(std=0.1)
        return model

    return fill


@pytest.fixture
def write_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Write an adapter directory as somebody else would; arguments replace config fields."""

    def write(tensors: Mapping[str, Tensor], name: str = "adapter", **fields: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": None}
        (folder / "adapter_config.json").write_text(json.dumps(config | fields))
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        return folder

    return write
