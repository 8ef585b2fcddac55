"""Adapters on the command line: the golden ones, and ones that do not belong to the base."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import k3tune
from command_line import make_text_base, run_command
from k3tune.lora import LoraSpec, attach_lora, save_adapter

LOGIT_TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def base(fixtures):
    return fixtures / "k3_tiny"


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """One that k3tune wrote for the base, trained in bf16 as it were."""
    model = attach_lora(k3tune.load_base(base), LoraSpec(targets=("attention",), rank=2))
    return save_adapter(model, tmp_path_factory.mktemp("adapters") / "trained")


@pytest.fixture
def run(capsys):
    return lambda *arguments: run_command(capsys, *arguments)


@pytest.mark.parametrize("name", ["k3_tiny", "k3_tiny_shared_outer"])
def test_scores_with_an_adapter_are_the_golden_log_probabilities(run, fixtures, tmp_path, name):
    base = fixtures / name
    golden = load_file(base / "golden.safetensors")
    ids_BT = golden["input_ids"]
    expected_BTV = golden["lora_logits"].log_softmax(-1)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ids_BT.tolist()))
    status, _, err = run(
        "score", base, "--adapter", base / "adapter", "--input", rows, "--out", out,
        "--dtype", "float32",
    )  # fmt: skip
    assert status == 0 and "warning" not in err
    for row, expected_TV, line in zip(
        ids_BT, expected_BTV, out.read_text().splitlines(), strict=True
    ):
        scored = torch.tensor(json.loads(line)["logprobs"][1:])
        expected = expected_TV[:-1].gather(-1, row[1:, None])[:, 0]
        assert (scored - expected).abs().max() < 2 * LOGIT_TOLERANCE


def test_generation_with_an_adapter_continues_with_its_likeliest_token(run, base):
    golden = load_file(base / "golden.safetensors")
    prompt = " ".join(map(str, golden["input_ids"][0].tolist()))
    options = ["--prompt-ids", prompt, "--max-new-tokens", 1, "--adapter", base / "adapter"]
    assert run("generate", base, *options)[1] == f"{int(golden['lora_logits'][0, -1].argmax())}\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_of_this_base_is_taken_in_silence_whatever_its_folder_is_called(
    run, base, adapter, tmp_path, dtype
):
    moved = shutil.copytree(base, tmp_path / "renamed")
    status, _, err = run(
        "generate", moved, "--adapter", adapter, "--prompt-ids", 1, "--max-new-tokens", 1,
        "--dtype", dtype,
    )  # fmt: skip
    assert (status, err) == (0, "")


def test_an_adapter_of_a_base_with_other_weights_is_warned_about(run, base, adapter, tmp_path):
    changed = shutil.copytree(base, tmp_path / "k3_tiny")
    shard = changed / "model-00001-of-000009.safetensors"
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
    tensors[name].flatten()[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    status, _, err = run(
        "generate", changed, "--adapter", adapter, "--prompt-ids", 1, "--max-new-tokens", 1
    )
    assert status == 0 and len(err.splitlines()) == 1
    assert f"{adapter} was trained on another base than {changed}: on {base}" in err


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["too large to hash", "no fingerprint"])
def test_where_content_cannot_be_compared_names_are(
    run, base, adapter, tmp_path, monkeypatch, limit
):
    monkeypatch.setattr("k3tune.commands.loading._HASHED_BYTES", limit)
    foreign = shutil.copytree(adapter, tmp_path / "foreign")
    if limit:
        (foreign / "k3tune.json").unlink()
    config = json.loads((foreign / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/other-base"
    (foreign / "adapter_config.json").write_text(json.dumps(config))
    options = ["--prompt-ids", 1, "--max-new-tokens", 1, "--adapter", foreign]
    named = "somebody/other-base" if limit else str(base)
    assert (named in run("generate", base, *options)[2]) == bool(limit)
    renamed = shutil.copytree(base, tmp_path / "renamed")
    status, _, err = run("generate", renamed, *options)
    expected = f"says it was trained on {named}, and {renamed} may be another base"
    assert status == 0 and expected in err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is no directory, expected an adapter"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "expected adapter_model"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "score", "chat"])
def test_an_adapter_that_cannot_be_read_is_one_sentence(
    run, base, adapter, tmp_path, command, spoil, message
):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    spoil(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1, 2]\n")
    options = {
        "generate": ["--prompt-ids", 1],
        "score": ["--input", rows, "--out", tmp_path / "out.jsonl"],
        "chat": [],
    }[command]
    if command == "chat":
        base = make_text_base(base, tmp_path / "base")
    status, out, err = run(command, base, "--adapter", folder, *options)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_an_adapter_of_another_architecture_is_one_sentence(run, fixtures):
    status, _, err = run(
        "generate", fixtures / "k3_tiny", "--adapter", fixtures / "k3_tiny_shared_outer/adapter",
        "--prompt-ids", 1,
    )  # fmt: skip
    assert status == 2
    assert "expected" in err.splitlines()[-1]


@pytest.mark.parametrize("command", ["export", "import"])
def test_an_adapter_is_not_replaced_by_a_form_of_itself(run, adapter, tmp_path, command):
    """Nothing else has the factors as they were trained."""
    folder = shutil.copytree(adapter, tmp_path / "trained")
    before = (folder / "adapter_model.safetensors").read_bytes()
    options = ["--format", "vllm"] if command == "export" else []
    status, out, err = run(command, folder, "--out", folder / ".", "--overwrite", *options)
    assert (status, out) == (2, "") and "it is the input" in err and err.count("\n") == 1
    assert (folder / "adapter_model.safetensors").read_bytes() == before
