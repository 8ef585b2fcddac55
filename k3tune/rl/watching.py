"""The train-rollout KL of every step, held against the floor and written down."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from k3tune.lora import disable_adapter
from k3tune.monitor import Floor, FloorMonitor
from k3tune.monitor.canary import Canary
from k3tune.monitor.routing import shared_experts
from k3tune.monitor.samples import Samples, concatenate
from k3tune.rl.calibration import (
    Trajectory,
    canary_scores,
    draw_calibration,
    floor_key,
    measure_floor,
    pin_canaries,
    pinned_canaries,
    score_rollouts,
)
from k3tune.rl.hooks import Scored
from k3tune.rl.objective import TokenWeights
from k3tune.rl.routing import rollout_experts
from k3tune.rl.scoring import samples_of
from k3tune.train.metrics import sum_over_processes

if TYPE_CHECKING:
    from k3tune.rl.grpo import K3GRPOTrainer

logger = logging.getLogger(__name__)

# what trackers get of a step's record, as mismatch/<name>
_TRACKED = (
    *("k3", "k3_token_mean", "k1", "abs_mean", "abs_max", "is_mean", "ess", "nan_count"),
    *("excess", "ewma", "cusum", "router_mismatch"),
)


class StepWatch:
    """Collects a step's samples as both sides scored them, and judges them at its end."""

    def __init__(self, trainer: "K3GRPOTrainer") -> None:
        self._trainer = trainer
        self._monitor = FloorMonitor(None)
        self._pinned: list[Trajectory] | None = None
        self._canary_scores: tuple[Sequence[float], Sequence[float]] | None = None
        self._parts: list[Samples] = []
        self._continues = True

    def begin(self) -> None:
        """Measure the floor or read that of this run, and pin the canary; B is 0 meanwhile."""
        trainer, options = self._trainer, self._trainer.monitor
        if trainer.sync.version:
            # the engine has been used before
            trainer.sync.push_zero()
        floor: Floor | None = None
        difference: str | None = None
        if options.floor_prompts:
            floor = Floor.load(trainer.output_dir)
            if floor is not None:
                difference = floor.differs_from(floor_key(trainer))
        reused = floor is not None and difference is None
        # tests that began under another floor do not go on
        self._continues = reused or not options.floor_prompts
        pinned = pinned_canaries(trainer.output_dir) if options.canary else None
        if (options.floor_prompts and not reused) or (options.canary and pinned is None):
            floor, pinned = self._measure(floor if reused else None)
        self._pinned = pinned
        decode = trainer.processing_class.decode
        self._monitor = FloorMonitor(floor, canary=self._new_canary(), decode=decode)
        if floor is not None:
            rate = self._monitor.alarm_rate
            record = floor.record(reused=reused, not_reused=difference, alarm_rate=rate)
            trainer.run_files.write("floor", trainer.state.global_step, record)
            logger.info(
                "train-rollout KL (k3) at the floor: %.2e, 95 %% from %.2e to %.2e%s",
                floor.k3.value,
                floor.k3.low,
                floor.k3.high,
                ", as measured before" if reused else "",
            )

    def begin_step(self) -> None:
        """Score the canary with both sides, before the step samples and trains."""
        if self._pinned is not None:
            self._canary_scores = canary_scores(self._trainer, self._pinned)

    def add(self, scored: Scored, weights: TokenWeights) -> None:
        """Note a batch that trains."""
        routed = self._trainer.rollout.routing != "ignore"
        self._parts.append(samples_of(scored, weights, with_rollout_experts=routed))
        if self._trainer.routing_replay:
            self._trainer.count("router_mismatch_used", _mismatch_used(scored))

    def end_step(self, step: int, version: int) -> None:
        """Judge the step's samples and write its records.

        Args:
            step: that was just taken, from 1.
            version: of the adapter the trainer had in it.
        """
        trainer = self._trainer
        parts, self._parts = self._parts, []
        samples = gathered(concatenate(parts), trainer.accelerator)
        report = self._monitor.step(
            samples, adapter_version=version, canary_scores=self._canary_scores
        )
        trainer.run_files.write("mismatch", step, report.mismatch)
        if report.worst:
            trainer.run_files.write("worst", step, {"tokens": report.worst})
        for alarm in report.alarms:
            trainer.run_files.write("alarm", step, alarm)
            logger.warning("step %d: %s", step, alarm["text"])
        for name in _TRACKED:
            if report.mismatch[name] is not None:
                trainer.count(f"mismatch/{name}", float(report.mismatch[name]))
        trainer.count("mismatch/alarms", float(len(report.alarms)))
        # processes must agree on whether to stop
        alarms = torch.tensor(len(report.alarms), device=trainer.args.device)
        if int(sum_over_processes(alarms)):
            trainer.alarm = report.alarms[0]["text"] if report.alarms else "see the run log"

    def state(self) -> dict[str, Any]:
        """Of the tests and the canary, for a checkpoint."""
        return self._monitor.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the tests of a checkpoint, unless the floor is another one."""
        if self._continues:
            self._monitor.restore(state)
        else:
            logger.warning("the floor was measured again: its tests start anew")

    def _measure(self, floor: Floor | None) -> tuple[Floor | None, list[Trajectory] | None]:
        trainer = self._trainer
        rollouts, sample_ids = draw_calibration(trainer)
        if trainer.monitor.floor_prompts and floor is None:
            floor, samples = measure_floor(trainer, rollouts, sample_ids)
            if trainer.args.should_save:
                trainer.output_dir.mkdir(parents=True, exist_ok=True)
                floor.save(trainer.output_dir)
        else:
            rounding = trainer.rollout.train_activations
            with disable_adapter(trainer.model):
                samples = score_rollouts(trainer, rollouts, sample_ids, rounding=rounding)
        if not trainer.monitor.canary:
            return floor, None
        folder = trainer.output_dir if trainer.args.should_save else None
        return floor, pin_canaries(folder, rollouts, samples)

    def _new_canary(self) -> Canary | None:
        if self._pinned is None:
            return None
        with disable_adapter(self._trainer.model):
            theirs, ours = canary_scores(self._trainer, self._pinned)
        rounded = self._trainer.rollout.rollout_adapter_dtype != "float32"
        return Canary(theirs, ours, adapter_rounded=rounded)


def gathered(samples: Samples, accelerator: Any) -> Samples:
    """The samples of all processes; each has as many."""
    if accelerator.num_processes == 1:
        return samples
    values = {}
    for field in dataclasses.fields(Samples):
        array = getattr(samples, field.name)
        if array is None:
            continue
        tensor = torch.from_numpy(array).to(accelerator.device)
        if tensor.dtype in (torch.bool, torch.int16):
            # gloo carries neither
            tensor = tensor.int()
        if tensor.ndim > 1:
            tensor = accelerator.pad_across_processes(tensor, dim=1, pad_index=0)
        values[field.name] = accelerator.gather(tensor).cpu().numpy().astype(array.dtype)
    return Samples(**values)


def _mismatch_used(scored: Scored) -> float:
    """Share of (token, layer) whose experts in the forward are not the rollout's."""
    num_completion = scored.mask.shape[1]
    used_BCLA = scored.tap.used[:, -num_completion - 1 : -1].cpu()
    given_BCLA = rollout_experts(scored.tap, scored.rollouts, num_completion)
    mask_BC = scored.mask.bool().cpu().numpy()
    if not mask_BC.any():
        return 0.0
    shared = shared_experts(used_BCLA.numpy()[mask_BC], given_BCLA.numpy()[mask_BC])
    return float((shared < scored.tap.num_active).mean())
