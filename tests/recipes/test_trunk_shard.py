"""Both recipes with the trunk spread over processes, held against the same launch with it whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

# The tiny prompts of the RL tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))

from tiny_grpo import write_prompts

from k3tune.parallel.trunk_bytes import part_bytes
from k3tune.plan.adapter import RankFactors
from k3tune.plan.layout import Layout
from k3tune.plan.sizes import base_bytes
from k3tune.plan.traffic import step_traffic
from k3tune.published.architecture import parse_config, read_config
from k3tune.run_log import read_run_log
from tiny_run import make_base

pytestmark = pytest.mark.slow

REWARD = (
    "def length(completion_ids, **_):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
)
CHECKPOINTED = ("--activation_checkpointing", "true")


def curve(output_dir):
    names = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "entropy")
    records = read_run_log(output_dir).of_kind("train")
    return [tuple(record[name] for name in names) for record in records]


def trunk_of(output_dir):
    """What the log says of the trunk, a record a step."""
    names = ("trunk_received_bytes", "trunk_prefetch_hits", "trunk_resident_bytes")
    records = read_run_log(output_dir).of_kind("train")
    return [tuple(record[name] for name in names) for record in records]


def assert_same_run(output_dir, expected):
    """Losses, norms and every byte of the adapter's weights; the same base."""
    assert curve(output_dir) == curve(expected)
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (output_dir, expected)]
    assert files[0].read_bytes() == files[1].read_bytes()
    said = [
        json.loads((run / "adapter" / "k3tune.json").read_text()) for run in (output_dir, expected)
    ]
    assert said[0]["base"] == said[1]["base"]


@pytest.mark.parametrize("experts", ["1", "2"])
def test_sft_with_a_sharded_trunk_is_the_same_run(launch, flags, tmp_path, experts):
    words = (*flags, *CHECKPOINTED, "--expert_parallel_size", experts)
    words += ("--per_device_train_batch_size", "4")
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    launch("cpu2", *words, "--output_dir", str(whole))
    launch("cpu2", *words, "--output_dir", str(sharded), "--trunk_shard", "node")
    assert len(curve(sharded)) == 6
    assert_same_run(sharded, whole)

    architecture = parse_config(read_config(words[words.index("--base") + 1]))
    layout = Layout(gpus=2, trunk_ranks=2, zero_stage=2, dtype="float32")
    base = base_bytes(architecture, "float32")
    planned = step_traffic(architecture, base, RankFactors(0, 0), layout)
    received, hits, resident = zip(*trunk_of(sharded), strict=True)
    # after the first checkpoint, whose fingerprint of the base gathers every unit once
    *steps, third = (*received[:2], *received[3:], received[2])
    assert set(steps) == {planned.trunk}
    assert third == planned.trunk + resident[0]
    # of three units forward and two again: the first ever, and the first of each recompute
    assert hits[0] == 0.6 and {hits[1], *hits[3:]} == {0.8}
    planned_units = [*base.weights, [base.embedding]]
    assert set(resident) == {sum(part_bytes(unit, 2) for unit in planned_units)}


@pytest.fixture
def four(repository, tmp_path):
    """Writes a config file for four processes and a ZeRO stage."""

    def write(zero_stage):
        shipped = repository / "recipes" / "accelerate" / "cpu2.yaml"
        config = yaml.safe_load(shipped.read_text())
        config["num_processes"] = 4
        config["deepspeed_config"]["zero_stage"] = zero_stage
        file = tmp_path / "four.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    return write


ON_FOUR = [(4, 2, 1), (2, 4, 2)]
"""Ranks that share experts, ranks that share a trunk (fewer, and more), ZeRO stage."""


@pytest.mark.parametrize(("experts", "trunk", "zero_stage"), ON_FOUR)
def test_sft_on_four_processes_is_the_same_run(
    launch, flags, four, tmp_path, experts, trunk, zero_stage
):
    words = (*flags, *CHECKPOINTED, "--expert_parallel_size", str(experts))
    words += ("--per_device_train_batch_size", "2")
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    file = four(zero_stage)
    launch(file, *words, "--output_dir", str(whole))
    launch(file, *words, "--output_dir", str(sharded), "--trunk_shard", str(trunk))
    assert len(curve(sharded)) == 6
    assert_same_run(sharded, whole)
    architecture = parse_config(read_config(words[words.index("--base") + 1]))
    base = base_bytes(architecture, "float32")
    _, _, resident = zip(*trunk_of(sharded), strict=True)
    units = [*base.weights, [base.embedding]]
    assert set(resident) == {sum(part_bytes(unit, trunk) for unit in units)}


def test_a_run_goes_on_with_its_trunk_spread_otherwise(launch, flags, tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    words = (*flags, *CHECKPOINTED, "--per_device_train_batch_size", "4")
    launch("cpu2", *words, "--output_dir", str(whole))
    launch("cpu2", *words, "--output_dir", str(changed), "--trunk_shard", "2")
    # as if it was stopped after its second checkpoint, and went on with a whole trunk
    for name in ("checkpoint-6", "adapter"):
        (changed / name).rename(tmp_path / f"gone-{name}")
    launch("cpu2", *words, "--output_dir", str(changed))
    assert_same_run(changed, whole)


def test_without_checkpointing_a_sharded_trunk_is_refused(flags, repository, environment, tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("recipes/sft.py", *flags, "--output_dir", str(tmp_path), "--trunk_shard", "2"),
    ]
    result = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "trunk_shard is 2 and activation_checkpointing is off, expected on" in result.stderr


def same_grpo_runs(launch, folder, repository, accelerate_config, trunk, *words):
    """The GRPO recipe with the trunk whole and shared; returns what the second one printed."""
    base = make_base(folder / "base")
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    (folder / "mine.py").write_text(REWARD)
    runs = [folder / name for name in ("whole", "sharded")]
    for output_dir, trunk_shard in zip(runs, ("none", trunk), strict=True):
        printed = launch(
            accelerate_config,
            *("--config", str(repository / "recipes" / "configs" / "nano_grpo.yaml")),
            *("--base", str(base), "--train_path", str(prompts), *CHECKPOINTED),
            *("--rewards", f"{folder / 'mine.py'}:length", "--num_generations", "2"),
            *("--per_device_train_batch_size", "2", "--max_completion_length", "6"),
            *("--max_steps", "5", "--save_steps", "2", "--floor_prompts", "4"),
            *("--floor_samples", "2", "--disable_tqdm", "true", "--report_to", "none"),
            *("--output_dir", str(output_dir), "--trunk_shard", trunk_shard, *words),
            recipe="grpo",
        )
    assert len(curve(runs[1])) == 5
    assert_same_run(*reversed(runs))
    for kind in ("floor", "mismatch"):
        records = [read_run_log(output_dir).of_kind(kind) for output_dir in runs]
        names = set(records[0][0]) - {"time", "key", "seconds"}
        for found, expected in zip(*records, strict=True):
            assert {n: found[n] for n in names} == {n: expected[n] for n in names}
    return printed


@pytest.mark.parametrize("experts", ["1", "2"])
def test_grpo_with_a_sharded_trunk_is_the_same_run(launch, repository, tmp_path, experts):
    printed = same_grpo_runs(
        launch, tmp_path, repository, "cpu2", "node", "--expert_parallel_size", experts
    )
    assert "the trunk is sharded: every sampled token" in printed


@pytest.mark.parametrize(("experts", "trunk", "zero_stage"), ON_FOUR)
def test_grpo_on_four_processes_is_the_same_run(
    launch, repository, four, tmp_path, experts, trunk, zero_stage
):
    words = ("--expert_parallel_size", str(experts))
    same_grpo_runs(launch, tmp_path, repository, four(zero_stage), str(trunk), *words)
