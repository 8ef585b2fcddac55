"""Five GRPO steps of one model, alone or expert parallel, on completions of unequal lengths."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert_runs import STEPS, Case, build, shards_of
from safetensors.torch import load_file, save_file
from torch import Tensor

# The smallest GRPO run is a helper of the trainer's tests.
sys.path.append(str(Path(__file__).parents[1] / "rl"))

from tiny_grpo import Wrapped, make_grpo, write_prompts

from checkpoints import build_checkpoint
from k3tune.arguments import RolloutArguments
from k3tune.lora import adapter_parameters
from k3tune.parallel.expert_parallel import ExpertParallel
from k3tune.published.architecture import parse_config, read_config
from k3tune.rl import build_engine
from k3tune.run_log import read_run_log
from tiny_run import add_tokenizer

ROWS = 8
"""Samples of a step, in all processes together."""
IDLE_EXPERTS = (4, 5, 6)
"""Experts that no token goes to where a case says so: all of a rank's, for two ranks and four."""
STOPS = tuple(range(0, 272, 7))
"""Ids that end a completion, so many that the lengths differ."""

CASES = (
    Case("grpo_sgd"),
    Case("grpo_adamw", optimizer="adamw", routing="idle_rank"),
    Case("grpo_shared_sgd", form="shared_outer", routing="idle_rank"),
    Case("grpo_shared_adamw", form="shared_outer", optimizer="adamw"),
)
EXACT_CASES = tuple(case._replace(name=f"exact_{case.name}", dtype="float64") for case in CASES)
"""Without the noise of fp32, which moves one process's own gradients by 2e-6 to 7e-6."""


class Stopping(Wrapped):
    """An engine that ends completions early, and notes how long they are."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.lengths: list[list[int]] = []

    def generate(self, prompts, sampling, seeds):
        rollouts = super().generate(prompts, replace(sampling, stop_token_ids=STOPS), seeds)
        self.lengths.append([len(rollout.completion_ids) for rollout in rollouts])
        return rollouts


def make_folder(folder: Path) -> Path:
    """Prompts, and a base for each routing: seven experts, which no number of ranks divides."""
    folder.mkdir(exist_ok=True)
    write_prompts(folder / "prompts.jsonl", STEPS * ROWS // 2)
    for routing in ("natural", "idle_rank"):
        shape = {"num_experts": 7, "num_experts_per_token": 3, "num_hidden_layers": 3}
        base = build_checkpoint(folder / routing, seed=2, vocab_size=272, mla_layers=[2], **shape)
        add_tokenizer(base)
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor[list(IDLE_EXPERTS)] = -100.0
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def run(folder: Path, case: Case, size: int, world: int) -> dict[str, Any]:
    """Train; losses, this process's first gradients and lengths of samples, and the model.

    Args:
        folder: of :func:`make_folder`.
        case: form, optimizer and routing.
        size: ranks that share experts.
        world: processes, of which this is one; 1 with all of a step's samples is a run alone.
    """
    base = folder / case.routing
    architecture = parse_config(read_config(base))
    parallel = None
    if size > 1:
        parallel = ExpertParallel(shards_of(case, architecture.num_experts, size))
    held = None if parallel is None else parallel.experts(architecture.moe_layers)
    model = build(base, case, held)
    if parallel is not None:
        parallel.attach(model)
    rollout = RolloutArguments(rollout_batch_size=3)
    engine = Stopping(build_engine(rollout, model))
    output_dir = folder / f"{case.name}_{size}_of_{world}"
    trainer = make_grpo(
        base,
        folder / "prompts.jsonl",
        output_dir,
        model=model,
        engine=engine,
        rollout=rollout,
        optim="sgd" if case.optimizer == "sgd" else "adamw_torch",
        learning_rate=0.02 if case.optimizer == "sgd" else 1e-3,
        max_steps=STEPS,
        max_completion_length=9,
        per_device_train_batch_size=ROWS // world,
    )
    gradients = first_gradients(trainer)
    trainer.train()
    losses = [record["loss"] for record in read_run_log(output_dir).of_kind("train")]
    return {
        "losses": losses,
        "gradients": gradients,
        "lengths": engine.lengths,
        "model": model,
        "parallel": parallel,
    }


def first_gradients(trainer: Any) -> dict[str, Tensor]:
    """A dictionary that the first step fills: name -> gradient before it is clipped."""
    from deepspeed.utils import safe_get_full_grad

    groups = adapter_parameters(trainer.model).values()
    named = {name: factor for group in groups for name, factor in group.items()}
    found: dict[str, Tensor] = {}
    training_step = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        engine = trainer.deepspeed
        if engine is not None and not found:
            # accelerate calls it within the backward
            take_step = engine.step

            def noted_step(*args: Any, **kwargs: Any) -> Any:
                found.update((n, safe_get_full_grad(p).clone()) for n, p in named.items())
                engine.step = take_step
                return take_step(*args, **kwargs)

            engine.step = noted_step
        loss = training_step(*args, **kwargs)
        if engine is None and not found:
            found.update((name, factor.grad.clone()) for name, factor in named.items())
        return loss

    trainer.training_step = noted
    return found
