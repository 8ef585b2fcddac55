"""What is measured before the first step, at B = 0: the floor by its causes, and the canary.

Every process samples and scores the same prompts, so that processes that share experts run along.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from k3tune.arguments import ACTIVATIONS
from k3tune.errors import K3TuneError
from k3tune.files import replace_file
from k3tune.lora import disable_adapter
from k3tune.lora.inject import base_of
from k3tune.model.scoring import score_rows
from k3tune.monitor import Floor
from k3tune.monitor.canary import choose_canaries
from k3tune.monitor.samples import Samples, concatenate
from k3tune.rl.hooks import Scored
from k3tune.rl.numerics import activation_rounding
from k3tune.rl.rollout import Rollout
from k3tune.rl.scoring import padded_batch, padded_logprobs, samples_of
from k3tune.rl.seeds import sample_seed
from k3tune.train.run_config import versions

if TYPE_CHECKING:
    from k3tune.rl.grpo import K3GRPOTrainer

Trajectory = tuple[list[int], list[int]]
"""Ids of a prompt and of a completion."""

CANARY_FILE = "canary.json"
# without a floor the canaries are chosen among so many samples
_CANARY_PROMPTS = 4


def draw_calibration(trainer: "K3GRPOTrainer") -> tuple[list[Rollout], list[int]]:
    """Completions of some of the run's prompts, sampled as its steps will be.

    Returns:
        The samples, and the rows of the data they belong to.
    """
    options, data = trainer.monitor, trainer.train_dataset
    count = min(options.floor_prompts or _CANARY_PROMPTS, len(data))
    each = options.floor_samples if options.floor_prompts else 1
    places = Random(trainer.args.seed).sample(range(len(data)), count)
    rows = [data[place] for place in places for _ in range(each)]
    seeds = [sample_seed(trainer.args.seed, "floor", 0, number) for number in range(len(rows))]
    prompts = [row["input_ids"] for row in rows]
    rollouts = trainer.engine.generate(prompts, trainer.sampling, seeds)
    return rollouts, [row["sample_id"] for row in rows]


def measure_floor(
    trainer: "K3GRPOTrainer", rollouts: Sequence[Rollout], sample_ids: Sequence[int]
) -> tuple[Floor, Samples]:
    """The floor, and its parts by cause.

    Args:
        trainer: its adapter is off meanwhile.
        rollouts: sampled with the adapter at B = 0.
        sample_ids: rows of the data they belong to.
    """
    ours, theirs = trainer.rollout.train_activations, trainer.rollout.activations
    routing = trainer.rollout.routing != "ignore"
    with disable_adapter(trainer.model):
        samples = score_rollouts(trainer, rollouts, sample_ids, rounding=ours)
        mirrored = samples
        parts: dict[str, Samples] = {}
        if ours != theirs:
            mirrored = score_rollouts(trainer, rollouts, sample_ids, rounding=theirs)
            parts["mxfp8"] = _between(samples, mirrored.train, samples.train)
        if routing:
            free, replayed = (
                score_rollouts(trainer, rollouts, sample_ids, rounding=ours, replay=replay)
                for replay in (False, True)
            )
            parts["routing"] = _between(samples, replayed.train, free.train)
    if trainer.sampling.temperature == 1:
        # engines score at temperature 1
        pairs = [(rollout.prompt_ids, rollout.completion_ids) for rollout in rollouts]
        scores = padded_logprobs(
            trainer.engine.score(pairs), torch.from_numpy(samples.train)
        ).numpy()
        parts["decode_prefill"] = _between(samples, samples.rollout, scores)
        parts["same_path"] = _between(samples, scores, mirrored.train)
    return Floor.calibrate(samples, key=floor_key(trainer), parts=parts), samples


def score_rollouts(
    trainer: "K3GRPOTrainer",
    rollouts: Sequence[Rollout],
    sample_ids: Sequence[int],
    *,
    rounding: str,
    replay: bool | None = None,
) -> Samples:
    """Score samples by the forward that trains, without its gradient.

    Args:
        trainer: with or without its adapter on.
        rollouts: the samples.
        sample_ids: rows of the data they belong to.
        rounding: of the experts' inputs, of ``k3tune.arguments.ACTIVATIONS``.
        replay: use the rollouts' experts; None does as the run.
    """
    size = trainer.args.per_device_train_batch_size
    pad = trainer.processing_class.pad_token_id
    routed = trainer.rollout.routing != "ignore"
    parts = []
    with as_sampled(trainer.model, rounding):
        for start in range(0, len(rollouts), size):
            chunk = rollouts[start : start + size]
            inputs = padded_batch(chunk, pad, trainer.args.device)
            (logprobs, entropies, _), tap = trainer.forward(
                trainer.model, chunk, inputs, replay=replay
            )
            scored = Scored(
                rollouts=chunk,
                sample_ids=sample_ids[start : start + size],
                advantages=torch.zeros(len(chunk)),
                logprobs=logprobs,
                sampled=padded_logprobs([r.logprobs for r in chunk], logprobs),
                mask=inputs["completion_mask"],
                entropies=entropies,
                tap=tap,
                prompt_tokens=inputs["prompt_mask"].shape[1],
                completion_ids=inputs["completion_ids"],
            )
            parts.append(samples_of(scored, None, with_rollout_experts=routed))
    return concatenate(parts)


def floor_key(trainer: "K3GRPOTrainer") -> dict[str, Any]:
    """What a floor depends on, as JSON values."""
    rollout, base = trainer.rollout, base_of(trainer.model)
    head = base.lm_head.weight
    key = {
        "engine": dict(trainer.engine.health().numerics),
        "trainer": {
            "dtype": str(head.dtype).removeprefix("torch."),
            "device": head.device.type,
            "kernels": base.model.kernels,
            "activations": rollout.train_activations,
            "routing": rollout.routing,
            "torch": versions()["torch"],
            "k3tune": versions()["k3tune"],
        },
        "base": trainer.base_sha256,
        "sampling": {
            **dataclasses.asdict(trainer.sampling),
            "prompts": trainer.monitor.floor_prompts,
            "samples": trainer.monitor.floor_samples,
        },
    }
    # as it reads from a file: JSON knows no tuples
    found: dict[str, Any] = json.loads(json.dumps(key))
    return found


def canary_scores(
    trainer: "K3GRPOTrainer", pinned: Sequence[Trajectory]
) -> tuple[list[float], list[float]]:
    """The pinned completions' tokens as engine and trainer score them, at temperature 1.

    The trainer's side has the engine's rounding and batches: what is left between them is the
    adapter.
    """
    theirs = trainer.engine.score(pinned)
    with as_sampled(trainer.model, trainer.rollout.activations):
        rows = score_rows(
            base_of(trainer.model),
            [[*prompt, *completion] for prompt, completion in pinned],
            batch_size=trainer.rollout.rollout_batch_size,
        )
    ours = [
        value
        for row, (prompt, _) in zip(rows, pinned, strict=True)
        for value in row[len(prompt) :]
        if value is not None
    ]
    return [value for scores in theirs for value in scores], ours


def pin_canaries(
    folder: Path | None, rollouts: Sequence[Rollout], samples: Samples
) -> list[Trajectory]:
    """Choose the trajectories and write them beside the floor.

    Args:
        folder: of the run; None where another process writes.
        rollouts: to choose from.
        samples: the same, scored.
    """
    chosen = [rollouts[place] for place in choose_canaries(samples)]
    pinned = [(list(rollout.prompt_ids), list(rollout.completion_ids)) for rollout in chosen]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt_ids": prompt, "completion_ids": ids} for prompt, ids in pinned]
        with replace_file(folder / CANARY_FILE) as file:
            json.dump({"trajectories": rows}, file)
    return pinned


def pinned_canaries(output_dir: Path) -> list[Trajectory] | None:
    """The trajectories that :func:`pin_canaries` wrote; None without any.

    Raises:
        K3TuneError: if the file is damaged.
    """
    path = output_dir / CANARY_FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rows = values["trajectories"]
        return [(list(row["prompt_ids"]), list(row["completion_ids"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise K3TuneError(
            f"cannot read {path} ({error}): remove it, and other completions are pinned"
        ) from error


@contextmanager
def as_sampled(model: torch.nn.Module, rounding: str) -> Iterator[None]:
    """The model in eval mode, without gradients, under a rounding; as it was afterwards."""
    assert rounding in ACTIVATIONS, f"{rounding=}"
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), activation_rounding(model, rounding):  # type: ignore[arg-type]
            yield
    finally:
        model.train(training)


def _between(samples: Samples, rollout: Any, train: Any) -> Samples:
    """The same completions with other scores on the two sides."""
    return dataclasses.replace(samples, rollout=rollout, train=train)
