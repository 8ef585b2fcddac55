"""The smallest GRPO run that has every part: base, tokenizer, prompts, engine, rewards, trainer."""

import json
import sys
from pathlib import Path
from typing import Any

from trl import GRPOConfig

# The tiny base of the training tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from k3tune.arguments import MonitorArguments, PromptArguments, RolloutArguments
from k3tune.data import K3Tokenizer
from k3tune.rl import K3GRPOTrainer, build_engine, trainer_class
from k3tune.rl.prompts import load_prompts
from tiny_run import adapted

GRPO: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 6,
}
NO_FLOOR = MonitorArguments(floor_prompts=0, canary=False)


def write_prompts(file: Path, count: int) -> Path:
    """Write sums, the longer the later."""
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question = "+".join(["1"] * (1 + number % 3)) + f"+{number}"
            row = {"prompt": [{"role": "user", "content": question}], "answer": str(number)}
            stream.write(json.dumps(row) + "\n")
    return file


def spread(completion_ids, **_):
    """A reward that differs between almost any two completions."""
    return [float(sum(ids) % 11) for ids in completion_ids]


class Wrapped:
    """An engine that changes what another one does."""

    def __init__(self, engine):
        self.engine = engine
        self.pushed = []

    def load_adapter(self, version, source):
        self.pushed.append((version, {key: value.clone() for key, value in source.items()}))
        self.engine.load_adapter(version, source)

    def generate(self, prompts, sampling, seeds):
        return self.engine.generate(prompts, sampling, seeds)

    def score(self, sequences):
        return self.engine.score(sequences)

    def health(self):
        return self.engine.health()

    def close(self):
        self.engine.close()


def make_grpo(
    base: Path,
    prompts: Path,
    output_dir: Path,
    *,
    rewards: Any = None,
    model: Any = None,
    engine: Any = None,
    rollout: RolloutArguments | None = None,
    monitor: MonitorArguments | None = NO_FLOOR,
    callbacks: Any = None,
    evaluate: bool = False,
    **options: Any,
) -> K3GRPOTrainer:
    """A trainer on the CPU; ``options`` go to TRL's arguments, ``evaluate`` is on the prompts."""
    tokenizer = K3Tokenizer.from_pretrained(base)
    rollout = RolloutArguments() if rollout is None else rollout
    model = adapted(base) if model is None else model
    data = PromptArguments(str(prompts), thinking_effort="none")
    dataset = load_prompts(str(prompts), data, tokenizer)
    return trainer_class(rollout)(
        model,
        GRPOConfig(str(output_dir), **{**GRPO, **options}),
        dataset,
        dataset if evaluate else None,
        engine=build_engine(rollout, model, output_dir) if engine is None else engine,
        rewards=[spread] if rewards is None else rewards,
        processing_class=tokenizer,
        rollout=rollout,
        monitor=monitor,
        callbacks=callbacks,
    )
