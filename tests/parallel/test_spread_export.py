"""An adapter that processes trained and wrote together: its exports are those of one process."""

import json
from pathlib import Path

import pytest
from exports import check_round_trips
from ranks import run_ranks
from safetensors.torch import load_file

from k3tune.lora.export.factors import adapter_folder
from tiny_run import make_base


@pytest.mark.parametrize(
    ("source", "base", "form"),
    [("sgd.adapter", "base", "per_expert"), ("sft_two/checkpoint-4", "sft_base", "shared_outer")],
    ids=["adapter", "checkpoint"],
)
def test_two_processes_adapter_is_served_as_one_process_would_have_it(
    two, tmp_path, source, base, form
):
    written = adapter_folder(two / source)
    assert json.loads((written / "k3tune.json").read_text())["form"] == form
    # live factors: at the start B is zero
    tensors = load_file(written / "adapter_model.safetensors")
    assert all(value.any() for value in tensors.values())
    check_round_trips(two / source, two / base, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_so_is_the_checkpoint_of_any_topology(tmp_path, size):
    """Of four processes: the experts of each are all, every second process's, or its own."""
    base = make_base(tmp_path / "sft_base")
    worker = Path(__file__).with_name("expert_cases.py")
    forms = ("per_expert", "shared_outer")
    run_ranks(worker, 4, tmp_path, size, *(f"sft={form}:{form}" for form in forms))
    for form in forms:
        check_round_trips(tmp_path / f"sft_{form}" / "checkpoint-4", base, tmp_path / form)
