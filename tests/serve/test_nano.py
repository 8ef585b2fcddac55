"""GRPO on the shipped base over a server's process: tokens and verdicts of the local engine."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from running import process
from sglang_front import sglang_front

import k3tune.rl.grpo
from k3tune.rl.seeds import sample_seed
from k3tune.run_log import read_run_log

STEPS = 3
FEW = [
    *("--max_steps", str(STEPS), "--num_generations", "4", "--per_device_train_batch_size", "16"),
    *("--max_completion_length", "32", "--floor_prompts", "4", "--floor_samples", "2"),
    *("--keep_rollouts", str(STEPS), "--save_strategy", "no", "--report_to", "none"),
    *("--disable_tqdm", "true"),
]
# SGLang has no place for factors of KDA and of the latent
OF_SGLANG = ["--lora_targets", "experts", "shared_experts", "dense"]
# other batches round otherwise: by 6e-6 where it was measured, over eight steps of 64 samples
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Where runs are, which the server may read; with prompts of the demo."""
    pytest.importorskip("reasoning_gym", reason="needs the extra `demo`")
    from make_nano_data import rl_rows

    folder = tmp_path_factory.mktemp("nano")
    lines = (json.dumps(row) for row in rl_rows(64, seed=0))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def server(repository, root):
    with process(repository, repository / "k3tune/assets/k3-nano", "--adapter-root", root) as (
        url,
        _,
    ):
        yield url


@pytest.fixture
def train(repository, root, monkeypatch):
    """Run the recipe with these options; what it sampled and logged."""

    def train(name: str, *options: str) -> dict[str, Any]:
        script = str(repository / "recipes" / "grpo.py")
        config = str(repository / "recipes" / "configs" / "nano_grpo.yaml")
        words = ["--config", config, "--base", str(repository / "k3tune/assets/k3-nano"), *FEW]
        words += ["--train_path", str(root / "prompts.jsonl"), "--output_dir", str(root / name)]
        monkeypatch.setattr(sys, "argv", [script, *words, *options])
        assert runpy.run_path(script)["main"]() == 0
        log = read_run_log(root / name)
        rollouts = sorted((root / name / "rollouts").iterdir())
        rows = [json.loads(line) for file in rollouts for line in file.read_text().splitlines()]
        mismatch = log.of_kind("mismatch")
        print(name, [(record["k3"], record["verdict"]) for record in mismatch])
        return {
            "tokens": [(row["prompt_ids"], row["completion_ids"]) for row in rows],
            "logprobs": [row["logprobs"] for row in rows],
            "rewards": [record["reward"] for record in log.of_kind("train")],
            "verdicts": [record["verdict"] for record in mismatch],
            "canary": [record["canary"]["verdict"] for record in mismatch],
        }

    return train


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("tokens", "rewards", "verdicts", "canary"):
        assert found[kind] == expected[kind], kind
    for mine, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=ROUNDING)
    assert found["verdicts"] == ["at floor"] * STEPS
    assert len(found["tokens"]) == 16 * STEPS and any(found["rewards"])


@pytest.mark.slow
def test_servers_of_vllms_calls_give_the_local_engines_run(train, server):
    expected = train("local")
    for engine in ("k3tune", "vllm"):
        # the second gets its adapters in vLLM's own layout
        check_same(train(engine, "--engine", engine, "--engine_urls", server), expected)


@pytest.mark.slow
def test_servers_of_sglangs_calls_give_the_local_engines_run(train, server, monkeypatch):
    def short_seed(*place: Any) -> int:
        """As SGLang takes them, on both sides."""
        return sample_seed(*place) & 0x7FFFFFFF

    monkeypatch.setattr(k3tune.rl.grpo, "sample_seed", short_seed)
    expected = train("local-short", *OF_SGLANG)
    with sglang_front(server) as url:
        options = ("--engine", "sglang", "--engine_urls", url, *OF_SGLANG)
        check_same(train("sglang", *options), expected)
