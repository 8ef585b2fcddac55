"""The three commands as a user types them: what they print, and how they exit."""

import json

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from k3tune.commands import export as commands
from k3tune.errors import K3TuneError
from k3tune.lora import attach_lora, save_adapter
from k3tune.model import load_base


@pytest.fixture(scope="module")
def invoke():
    """Run a command line; an error a user can cause is raised."""
    app = typer.Typer()
    app.command("export")(commands.export)
    app.command("import")(commands.import_)
    app.command("verify")(commands.verify)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, K3TuneError):
            raise result.exception
        return result

    return run


@pytest.fixture
def source(folder, spec, randomise, tmp_path):
    model = load_base(folder, kernels="reference")
    model = randomise(attach_lora(model, spec(targets=["o_proj", "experts", "latent"])))
    return save_adapter(model, tmp_path / "trained", version=3)


def test_export_import_verify(invoke, source, folder, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    result = invoke("export", source, "--format", "vllm", "--out", out)
    assert result.exit_code == 0
    for words in (
        "vllm 0.33.0 does not serve this adapter as released",
        "to patch: the K3 class has no SupportsLoRA",
        "vllm serve",
        "form of the experts' factors: per_expert",
    ):
        assert words in result.stdout
    options = ["--base", folder, "--kernels", "reference"]
    result = invoke("verify", out, *options, "--against", source, "--expect-version", 3)
    assert result.exit_code == 0 and result.stdout.endswith("no fault found\n")
    result = invoke("import", out, "--out", back)
    assert "7 modules" not in result.stdout and "are those of the training" in result.stdout
    trained, found = (load_file(path / "adapter_model.safetensors") for path in (source, back))
    assert trained.keys() == found.keys()


def test_a_fault_is_exit_code_1_and_named(invoke, source, folder, tmp_path):
    out = tmp_path / "out"
    invoke("export", source, "--format", "peft", "--out", out)
    tensors = load_file(out / "adapter_model.safetensors")
    key = next(key for key in tensors if "o_proj.lora_B" in key)
    tensors[key] *= 2
    save_file(tensors, out / "adapter_model.safetensors")
    options = ["--base", folder, "--kernels", "reference", "--against", source]
    result = invoke("verify", out, *options)
    assert result.exit_code == 1
    assert "FAULT wrong scale: model.layers.0.self_attn.o_proj" in result.stdout
    result = invoke("verify", out, *options, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {fault["name"] for fault in found["faults"]} >= {"wrong scale", "tensor changed"}


def test_drop_takes_names_with_commas(invoke, source, tmp_path):
    with pytest.raises(K3TuneError, match=r"--drop routed_expert_down_proj,routed_expert_up_proj$"):
        invoke("export", source, "--format", "sglang", "--out", tmp_path / "no")
    names = "routed_expert_down_proj,routed_expert_up_proj"
    arguments = ["--format", "sglang", "--out", tmp_path / "out", "--drop", names, "--json"]
    report = json.loads(invoke("export", source, *arguments).stdout)
    assert report["dropped"].keys() == set(names.split(","))
    assert report["engine"] == "sglang 0.5.23"


def test_merged_is_refused_with_the_figure(invoke, source, folder, tmp_path):
    arguments = ["--format", "merged", "--out", tmp_path / "out"]
    with pytest.raises(K3TuneError, match=r"merging is refused: .* % of the update"):
        invoke("export", source, *arguments, "--base", folder)
    assert not (tmp_path / "out").exists()
