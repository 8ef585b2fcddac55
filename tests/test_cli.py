"""The command line through its own door: what it prints, writes, refuses and returns."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from command_line import run_command
from k3tune.cli import app, main

LOGIT_TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def base(fixtures):
    return fixtures / "k3_tiny"


@pytest.fixture(scope="module")
def golden(base):
    return load_file(base / "golden.safetensors")


@pytest.fixture
def run(capsys):
    return lambda *arguments: run_command(capsys, *arguments)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("command", ["", "inspect", "score", "generate", "chat"])
def test_help_answers_within_a_second_and_without_torch(repository, command):
    code = "import sys, k3tune.cli\ntry:\n    k3tune.cli.main([*sys.argv[1:], '--help'])\n"
    code += "finally:\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    # of the processor: a busy machine makes nobody's code slow
    for _ in range(3):
        before = sum(os.times()[2:4])
        result = subprocess.run(
            [sys.executable, "-c", code, *command.split()],
            cwd=repository,
            capture_output=True,
            text=True,
        )
        took_s = sum(os.times()[2:4]) - before
        assert result.returncode == 0, result.stderr
        if took_s < 1:
            break
    expected = ["--help"] if command else ["inspect", "score", "generate", "chat"]
    assert all(word in result.stdout for word in expected)
    assert took_s < 1


def test_the_list_of_commands_says_each_in_a_whole_sentence(run):
    status, out, _ = run("--help")
    commands = out.partition("Commands:\n")[2].splitlines()
    assert status == 0 and len(commands) >= 4
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


@pytest.mark.parametrize("name", [command.name for command in app.registered_commands] + [""])
def test_help_fits_a_narrow_terminal_and_shows_no_markup(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    command = name or "--help"
    status, out, _ = run(*command.split(), *(["--help"] if name else []))
    assert status == 0 and "[[" not in out and "None" not in out
    assert max(map(len, out.splitlines())) <= 80
    # the first paragraph, and every option's text, are sentences
    assert re.search(r"\n\n  [A-Z][^\n]+\.\n", out)


def test_inspect_prints_json_alone_and_finds_no_problem_in_a_good_checkpoint(run, base):
    status, out, err = run("inspect", base, "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    keys = {"text_parameters", "parameters", "tensors", "bytes", "groups", "problems"}
    assert set(facts) == keys and facts["problems"] == []


def test_inspect_names_problems_and_exits_with_1(run, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "damaged")
    (folder / "model-00003-of-000009.safetensors").unlink()
    status, out, _ = run("inspect", folder, "--json")
    assert status == 1
    assert any("model-00003-of-000009" in problem for problem in json.loads(out)["problems"])
    status, out, _ = run("inspect", folder)
    assert status == 1
    assert "model-00003-of-000009" in out


def test_inspect_reads_a_checkpoint_without_torch(base, repository):
    code = "import sys, k3tune.cli\ntry:\n    k3tune.cli.main(['inspect', sys.argv[1]])\n"
    code += "finally:\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code, str(base)], cwd=repository, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "16" in result.stdout and "verdict: " in result.stdout


def test_scores_are_the_golden_log_probabilities(run, base, golden, tmp_path):
    ids_BT = golden["input_ids"]
    expected_BTV = golden["logits"].log_softmax(-1)
    rows = write_rows(tmp_path / "rows.jsonl", ids_BT.tolist())
    status, out, err = run(
        "score", base, "--input", rows, "--out", tmp_path / "out.jsonl", "--dtype", "float32"
    )
    assert (status, out) == (0, "")
    assert f"{ids_BT.shape[0]} rows" in err
    for row, expected_TV, scored in zip(
        ids_BT, expected_BTV, read_rows(tmp_path / "out.jsonl"), strict=True
    ):
        first, *rest = scored["logprobs"]
        expected = expected_TV[:-1].gather(-1, row[1:, None])[:, 0]
        assert list(scored) == ["logprobs"] and first is None and len(rest) == len(row) - 1
        assert (torch.tensor(rest) - expected).abs().max() < 2 * LOGIT_TOLERANCE


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_of_every_length_score_as_they_do_alone(run, base, tmp_path, batch_size):
    rows = [[5], [], [1, 2, 3, 4, 5, 6, 7], [9, 8], [], [7, 7, 7, 7]]
    together = tmp_path / "together.jsonl"
    status, _, _ = run(
        "score", base, "--input", write_rows(tmp_path / "rows.jsonl", rows), "--out", together,
        "--dtype", "float32", "--batch-size", batch_size,
    )  # fmt: skip
    assert status == 0
    scores = [row["logprobs"] for row in read_rows(together)]
    assert [len(score) for score in scores] == [len(row) for row in rows]
    assert scores[0] == [None] and scores[1] == []
    for row, score in zip(rows, scores, strict=True):
        alone = tmp_path / "alone.jsonl"
        run(
            "score", base, "--input", write_rows(tmp_path / "row.jsonl", [row]), "--out", alone,
            "--dtype", "float32",
        )  # fmt: skip
        [expected] = read_rows(alone)
        assert score[1:] == pytest.approx(expected["logprobs"][1:], abs=1e-5)


def test_an_empty_input_gives_an_empty_output(run, base, tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    status, _, _ = run(
        "score", base, "--input", tmp_path / "none.jsonl", "--out", tmp_path / "out.jsonl"
    )
    assert status == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2", "line 2 is no JSON"),
        ("", "line 2 is no JSON"),
        ("{}", "line 2 is a JSON dict, expected a list of token ids"),
        ("[1, true]", "line 2 holds True, expected token ids"),
        ("[1.0]", "line 2 holds 1.0"),
        ("[[1]]", "line 2 holds [1]"),
        ("[3, 320]", "line 2 has id 320 at position 1, expected ids from 0 to 319"),
        ("[-1]", "line 2 has id -1 at position 0"),
        ("[" * 100_000, "line 2 is no JSON"),
    ],
    ids=lambda text: text[:12],
)
def test_a_bad_line_is_named_and_the_old_output_kept(run, base, tmp_path, line, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"[1, 2]\n{line}\n[3]\n")
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    status, stdout, err = run("score", base, "--input", rows, "--out", out)
    assert (status, stdout) == (2, "")
    assert f"{rows} {message}" in err and len(err.splitlines()) == 1
    assert out.read_text() == "precious\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_the_input_is_never_overwritten(run, base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [[1, 2]])
    status, _, err = run("score", base, "--input", rows, "--out", tmp_path / "." / "rows.jsonl")
    assert status == 2 and "it is the input" in err and len(err.splitlines()) == 1
    assert read_rows(rows) == [[1, 2]]


def test_bytes_that_are_no_utf8_are_a_bad_line(run, base, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"[1]\n\xff\xfe\n")
    status, _, err = run(
        "score", base, "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "out"
    )
    assert status == 2 and "line 2 is no JSON" in err


def test_a_failure_half_way_leaves_the_old_output(run, base, tmp_path, monkeypatch):
    import k3tune.model.scoring

    def fail(*args, **kwargs):
        raise RuntimeError("half way")

    monkeypatch.setattr(k3tune.model.scoring, "score_rows", fail)
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    rows = write_rows(tmp_path / "rows.jsonl", [[1, 2]])
    with pytest.raises(RuntimeError, match="half way"):
        main(["score", str(base), "--input", str(rows), "--out", str(out)])
    assert out.read_text() == "precious\n"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"--input": "missing.jsonl"}, "cannot read"),
        ({"--out": "no/such/folder/out.jsonl"}, "cannot write"),
        ({"--out": "."}, "it is no regular file"),
    ],
    ids=str,
)
def test_files_that_cannot_be_used_are_refused_before_loading(run, base, tmp_path, paths, message):
    write_rows(tmp_path / "rows.jsonl", [[1, 2]])
    names = {"--input": "rows.jsonl", "--out": "out.jsonl"} | paths
    options = [word for key, name in names.items() for word in (key, tmp_path / name)]
    status, _, err = run("score", base, *options)
    assert status == 2
    assert message in err and len(err.splitlines()) == 1


def test_generation_continues_with_the_likeliest_golden_token(run, base, golden):
    ids_T = golden["input_ids"][0]
    likeliest = int(golden["logits"][0, -1].argmax())
    prompt = " ".join(map(str, ids_T.tolist()))
    status, out, _ = run(
        "generate", base, "--prompt-ids", prompt, "--max-new-tokens", 1, "--dtype", "float32"
    )
    assert status == 0
    assert out == f"{likeliest}\n"


def test_prompts_of_a_file_continue_as_each_alone(run, base, tmp_path):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    status, out, _ = run(
        "generate", base, "--prompt-ids-file", write_rows(tmp_path / "prompts.jsonl", prompts),
        "--max-new-tokens", 6, "--dtype", "float32", "--json",
    )  # fmt: skip
    assert status == 0
    objects = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt_ids"] for row in objects] == prompts
    assert {row["finish_reason"] for row in objects} == {"length"}
    for row in objects:
        _, alone, _ = run(
            "generate", base, "--prompt-ids", json.dumps(row["prompt_ids"]),
            "--max-new-tokens", 6, "--dtype", "float32",
        )  # fmt: skip
        assert row["completion_ids"] == [int(word) for word in alone.split()]


def test_a_seed_repeats_a_sample_and_top_k_of_one_is_greedy(run, base):
    def sample(*options):
        return run("generate", base, "--prompt-ids", "1,2,3", "--max-new-tokens", 8, *options)[1]

    assert sample("--temperature", 1, "--seed", 7) == sample("--temperature", 1, "--seed", 7)
    assert sample("--temperature", 1, "--seed", 7) != sample("--temperature", 1, "--seed", 8)
    assert sample("--temperature", 1, "--top-k", 1) == sample()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected one of --prompt, --messages, --prompt-ids, --prompt-ids-file"),
        (["--prompt-ids", "1", "--prompt-ids-file", "x"], "got --prompt-ids and --prompt-ids-file"),
        (["--prompt-ids", "1 two"], "--prompt-ids holds 'two'"),
        (
            ["--prompt-ids", "1 320"],
            "prompt 1 has id 320 at position 1, expected ids from 0 to 319",
        ),
        (["--prompt-ids", ""], "prompt 1 is empty"),
        (["--prompt-ids", "1", "--top-p", "0.9"], "need --temperature above 0"),
        (["--prompt-ids", "1", "--seed", "3"], "need --temperature above 0"),
        (["--prompt-ids", "1", "--temperature", "inf"], "--temperature is inf, expected 0"),
        (["--prompt-ids", "1", "--temperature", "1e-9"], "--temperature is 1e-09, expected 0"),
        (["--prompt-ids", "1", "--temperature", "1", "--top-p", "0"], "--top-p is 0.0, expected"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(run, base, options, message):
    status, out, err = run("generate", base, *options)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_a_folder_that_is_no_checkpoint_is_one_sentence(run, tmp_path):
    status, out, err = run("generate", tmp_path, "--prompt-ids", "1")
    assert (status, out) == (2, "")
    assert "config.json" in err and len(err.splitlines()) == 1


def test_a_backend_the_machine_lacks_is_one_sentence(run, base, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    status, _, err = run("generate", base, "--prompt-ids", "1", "--kernels", "triton")
    assert status == 2 and len(err.splitlines()) == 1
    assert "'triton'" in err and "use 'auto' or 'reference'" in err
