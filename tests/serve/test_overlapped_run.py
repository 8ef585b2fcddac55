"""GRPO that samples ahead over a real server: one version behind, and weighed for it."""

import sys
from pathlib import Path

import pytest

# The tiny run of the RL tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))

from running import start
from tiny_grpo import GRPO, NO_FLOOR, spread, write_prompts
from trl import GRPOConfig

from k3tune.arguments import PromptArguments, RolloutArguments
from k3tune.data import K3Tokenizer
from k3tune.errors import ConfigError
from k3tune.rl import build_engine, trainer_class
from k3tune.rl.overlap import OverlappedGRPOTrainer
from k3tune.rl.prompts import load_prompts
from k3tune.run_log import read_run_log
from tiny_run import adapted


def make_trainer(folders: Path, url: str, output_dir: Path, **options) -> OverlappedGRPOTrainer:
    tokenizer = K3Tokenizer.from_pretrained(folders / "base")
    rollout = RolloutArguments(
        engine="k3tune", engine_urls=[url], on_stale_version="correct", overlap=True
    )
    prompts = write_prompts(output_dir.parent / "prompts.jsonl", 6)
    data = PromptArguments(str(prompts), thinking_effort="none")
    model = adapted(folders / "base")
    return trainer_class(rollout)(
        model,
        GRPOConfig(str(output_dir), **{**GRPO, **options}),
        load_prompts(str(prompts), data, tokenizer),
        engine=build_engine(rollout, model, output_dir),
        rewards=[spread],
        processing_class=tokenizer,
        rollout=rollout,
        monitor=NO_FLOOR,
    )


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_sampled_while_the_ones_before_train(folders, accumulate):
    output_dir = folders / "adapters" / f"overlapped-{accumulate}"
    with start(folders) as server:
        trainer = make_trainer(
            folders,
            server.url,
            output_dir,
            max_steps=5,
            gradient_accumulation_steps=accumulate,
            per_device_train_batch_size=4 // accumulate,
        )
        trainer.train()
        engine = trainer.engine
        engine.close()
    log = read_run_log(output_dir)
    stale = [record["stale_samples"] for record in log.of_kind("train")]
    # 3 steps an epoch (6 prompts, 2 at once): the first of each is sampled when its turn comes
    assert stale == [0, 4, 4, 0, 4]
    assert engine.num_prefetched == 12 and engine.num_discarded == 0
    assert [record["version_lag"] for record in log.of_kind("mismatch")] == [0, 1, 1, 0, 1]


@pytest.mark.slow
def test_what_does_not_go_with_overlap_is_refused(folders):
    with start(folders) as server:
        with pytest.raises(ConfigError, match="every step has its own samples"):
            make_trainer(folders, server.url, folders / "adapters" / "refused", num_iterations=2)
