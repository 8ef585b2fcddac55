"""Adapters that processes wrote together, held against the files of one process, and exported."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from k3tune.lora import (
    export_adapter,
    import_adapter,
    load_adapter,
    save_adapter,
    verify,
)
from k3tune.lora.export.factors import adapter_folder
from k3tune.model import load_base

CONSUMERS: dict[str, dict[str, Any]] = {
    "peft": {"format": "peft"},
    "vllm": {"format": "vllm"},
    "vllm_per_expert": {"format": "vllm", "form": "per_expert"},
    "sglang": {"format": "sglang"},
    "sglang_per_expert": {"format": "sglang", "form": "per_expert"},
}
REFUSED_BY_SGLANG = ("latent", r"self_attn\.(q|k|v|g|b|f_a|f_b)_proj")
TENSORS = "adapter_model.safetensors"


def write_alone(source: Path, base: Path, path: Path) -> Path:
    """The same factors saved by one process that holds all experts.

    Args:
        source: adapter directory or checkpoint.
        base: its base.
        path: directory to make.
    """
    written = adapter_folder(source)
    metadata = json.loads((written / "k3tune.json").read_text())
    model = load_adapter(load_base(base, dtype=torch.float32), written)
    return save_adapter(
        model,
        path,
        version=metadata["version"],
        provenance=metadata["provenance"],
        dtype=torch.float32,
        base_fingerprint=metadata["base"]["fingerprint"],
    )


def assert_same_bytes(actual: Path, expected: Path) -> None:
    """Two directories of the same files, each byte for byte."""
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in actual.iterdir()) == names
    for name in names:
        found, wanted = ((folder / name).read_bytes() for folder in (actual, expected))
        assert found == wanted, name


def check_round_trips(source: Path, base: Path, folder: Path) -> None:
    """Every format and form: as one process's export, verified, and back bit by bit.

    Args:
        source: adapter directory or checkpoint that several processes wrote.
        base: its base.
        folder: takes the results.
    """
    alone = write_alone(source, base, folder / "alone")
    written = adapter_folder(source)
    assert_same_bytes(written, alone)
    trained = load_file(written / TENSORS)
    for consumer, options in CONSUMERS.items():
        drop = REFUSED_BY_SGLANG if consumer.startswith("sglang") else ()
        outs = [folder / consumer / name for name in ("out", "alone")]
        for out, adapter in zip(outs, (source, alone), strict=True):
            options = {**options, "base": base, "drop": drop, "name": "served"}
            report = export_adapter(adapter, out, **options)
        # the card and the command name the directory
        for name in (TENSORS, "adapter_config.json", "tensors.sha256", "k3tune.json"):
            found, wanted = ((out / name).read_bytes() for out in outs)
            assert found == wanted, (consumer, name)
        verification = verify(outs[0], base, against=source)
        assert verification.ok, (consumer, verification.faults)
        assert "factors" in " ".join(verification.checks), verification.skipped
        back = import_adapter(outs[0], folder / consumer / "back", base=base).path
        restored = load_file(back / TENSORS)
        left_out = [key for key in trained if key not in restored]
        assert bool(left_out) == bool(report.dropped)
        assert restored.keys() <= trained.keys()
        for key, value in restored.items():
            assert value.dtype == trained[key].dtype
            assert torch.equal(value.view(torch.uint8), trained[key].view(torch.uint8)), key
