"""TRL's GRPO trainer over K3: an engine samples, the adapter follows it, a watch is kept."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn
from transformers import (
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig
from trl.trainer.utils import get_callable_name

from k3tune.arguments import MonitorArguments, RewardArguments, RolloutArguments
from k3tune.data import K3Tokenizer
from k3tune.errors import ConfigError, RolloutError
from k3tune.lora import adapter_parameters
from k3tune.rl.base_check import check_served_base
from k3tune.rl.guarded import GuardedReward, RewardError
from k3tune.rl.hooks import HookedGRPOTrainer, Scored
from k3tune.rl.numerics import activation_rounding
from k3tune.rl.objective import TokenWeights, importance_weights
from k3tune.rl.options import check_combinations, check_grpo, sampling_of
from k3tune.rl.prompts import SAMPLE
from k3tune.rl.rollout import Rollout, RolloutEngine
from k3tune.rl.rollout_files import rollout_row, write_rollouts
from k3tune.rl.seeds import sample_seed
from k3tune.rl.sync import AdapterSync
from k3tune.rl.watching import StepWatch
from k3tune.train.errors import TrainingError
from k3tune.train.metrics import sum_over_processes
from k3tune.train.run_config import RunConfig
from k3tune.train.trainer import K3Trainer, settle

logger = logging.getLogger(__name__)


class K3GRPOTrainer(K3Trainer, HookedGRPOTrainer):
    """Trains an adapter on what an engine samples with it.

    After every optimizer step the adapter is pushed to the engine under a new version. Every step
    says how far the policy that trains is from the one that sampled, out of the forward that
    trains. Samples depend on the run's seed alone, so a resumed run is the uninterrupted one.

    Attributes:
        engine: what samples.
        sync: the adapter's way into it.
        watch: floor, canary and alarms.
        alarm: the last one's sentence, or None.
    """

    args: GRPOConfig
    model: Any
    processing_class: Any

    alarm: str | None = None
    _signal = False
    _step_had_signal = False
    _eval_place = (0, -1)
    _logged_tokens = 0

    phases: ClassVar[tuple[str, ...]] = (
        *("data", "rollout", "reward", "forward_backward", "optimizer", "push", "monitor"),
    )

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        train_dataset: datasets.Dataset,
        eval_dataset: datasets.Dataset | None = None,
        *,
        engine: RolloutEngine,
        rewards: Sequence[Callable[..., Any]],
        processing_class: K3Tokenizer,
        rollout: RolloutArguments | None = None,
        monitor: MonitorArguments | None = None,
        thinking: bool = True,
        callbacks: list[TrainerCallback] | None = None,
        options: Sequence[Any] = (),
        free_options: Sequence[Any] = (),
    ) -> None:
        """Set a run up.

        Args:
            model: from :func:`k3tune.lora.attach_lora`, or loaded with ``trainable=True``.
            args: TRL's, ``bf16`` set to false; changed as :func:`~k3tune.train.trainer.settle`
                says. With ``beta`` the policy is held near the base.
            train_dataset, eval_dataset: of :func:`k3tune.rl.prompts.build_prompts`.
            engine: samples with the base's adapter at B = 0 until the first push.
            rewards: functions of TRL's signature (see :mod:`k3tune.rl.rewards`).
            processing_class: the tokenizer.
            rollout, monitor: options; None takes the defaults.
            thinking: prompts were rendered in K3's thinking mode.
            callbacks: beside k3tune's own.
            options, free_options: more of ``config.yaml``; a resumed run may change the free ones.

        Raises:
            ConfigError: for options K3, the engine or a resumable run cannot have.
        """
        check_grpo(args)
        self.rollout = RolloutArguments() if rollout is None else rollout
        self.monitor = MonitorArguments() if monitor is None else monitor
        check_combinations(args, self.rollout, len(rewards))
        _check_data(args, train_dataset, eval_dataset)
        settle(args)
        fixed, free = (*options, self.rollout), (self.monitor, *free_options)
        self.config = RunConfig.resolve(args, fixed, free)
        self.engine = engine
        self.thinking = thinking
        self.routing_replay = self.rollout.routing == "replay"
        self._rewards = [_guarded(reward) for reward in rewards]
        # TRL would copy the adapter as a reference and keep both in memory
        beta, args.beta = args.beta, 0.0
        super().__init__(
            model=model,
            reward_funcs=list(self._rewards),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self.beta = args.beta = beta
        self.set_up()

    def set_up(self) -> None:
        """Engine, watch and callbacks, once TRL's trainer is made."""
        self.sampling = sampling_of(self.args, self.processing_class.stop_token_ids)
        counts = self.rollout.on_unchanged_push == "count"
        self.sync = AdapterSync(self.engine, self.model, count_unchanged=counts)
        self.watch = StepWatch(self)
        super().set_up()
        # once the log is open
        self.add_callback(_RolloutBegin(self))

    def own_callbacks(self) -> list[TrainerCallback]:
        """The push comes first: what others measure at a step's end then includes it."""
        return [_RolloutSteps(self), *super().own_callbacks()]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`ResumableTrainer.train`.

        Raises:
            TrainingError: with ``stop_on_alarm``, once the checkpoint is written.
        """
        result = super().train(*args, **kwargs)
        if self.stopped:
            raise TrainingError(f"stopped by an alarm, with a checkpoint: {self.alarm}")
        return result

    @property
    def stopped(self) -> bool:
        """Whether an alarm ends the run."""
        return self.alarm is not None and self.monitor.stop_on_alarm

    @property
    def end_reason(self) -> str:
        """Why training ended, for the log."""
        return "alarm" if self.stopped else super().end_reason

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One batch under the trainer's own rounding; the engine sets its own while it samples."""
        with activation_rounding(self.model, self.rollout.train_activations):  # type: ignore[arg-type]
            return super().training_step(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss.

        Raises:
            TrainingError: naming the batch's samples, if it is not finite.
        """
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        value = float(loss.detach())
        if not value - value == 0:
            raise TrainingError(
                f"step {self.state.global_step + 1}: the loss is {value}, expected a finite one: "
                "lower the learning rate, or look at the step's samples in "
                f"{self._rollout_file}; the last checkpoint is from before"
            )
        return loss

    # ---- what the hooks ask for ----

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
        """Sample with the engine, and hold the samples' version against the trainer's."""
        training = self.model.training
        if training:
            self.clock.start("rollout")
            generation = self.micro_steps // (self.args.steps_per_generation or 1)
        else:
            generation = self._next_evaluation()
        first = self.args.process_index * len(prompts)
        seeds = [
            sample_seed(self.args.seed, "train" if training else "eval", generation, first + index)
            for index in range(len(prompts))
        ]
        rollouts = self.engine.generate(prompts, self.sampling, seeds)
        self._check_versions(rollouts)
        self._seeds, self._rollouts = seeds, rollouts
        return rollouts

    @contextmanager
    def rewarding(self, completions: Sequence[Any]) -> Iterator[None]:
        """Write the samples down first: a reward may fail, or hang until somebody kills the run."""
        training = self.model.training
        if training:
            self.clock.start("reward")
            self._rollout_file = write_rollouts(
                self.output_dir,
                self.state.global_step + 1,
                self.args.process_index,
                [
                    rollout_row(*parts)
                    for parts in zip(
                        self.sample_ids, self._seeds, self._rollouts, completions, strict=True
                    )
                ],
                keep=self.rollout.keep_rollouts,
            )
        try:
            yield
        except RewardError as error:
            place = f"samples: {self._rollout_file}" if training else "in an evaluation"
            raise RewardError(f"{error} ({place})") from error
        num_bad = sum(reward.num_bad for reward in self._rewards)
        for reward in self._rewards:
            reward.num_bad = 0
        self.count("bad_rewards", float(num_bad))
        if training:
            self.clock.start("forward_backward")

    def weigh(self, scored: Scored) -> TokenWeights:
        """Importance weights; the step's watch notes both log-probabilities."""
        weights = importance_weights(
            scored.logprobs,
            scored.sampled,
            scored.mask,
            mode=self.rollout.importance_sampling,
            cap=self.rollout.importance_cap,
        )
        count = max(int(scored.mask.sum()), 1)
        self.count("masked_fraction", weights.num_masked / count)
        self.count("importance_truncated_fraction", weights.num_truncated / count)
        if self.model.training:
            moves = scored.advantages.ne(0) & weights.weights.ne(0).any(1)
            self._signal |= bool(moves.any()) or self.beta != 0 or self.args.entropy_coef != 0
            self.watch.add(scored, weights)
        return weights

    # ---- around an optimizer step ----

    def begin(self) -> None:
        """Check the base, measure or read the floor, push an adapter that is not the base."""
        check_served_base(self)
        self.watch.begin()
        fresh = self.state.global_step == 0
        factors = [
            factor
            for group in adapter_parameters(self.model).values()
            for name, factor in group.items()
            if "lora_B" in name
        ]
        if fresh and any(bool(factor.detach().any()) for factor in factors):
            self.sync.push(moved=False)

    def after_optimizer_step(self) -> None:
        """Push the adapter, score the canary with both sides, and write the step's record."""
        signal = torch.tensor(int(self._signal), device=self.args.device)
        self._step_had_signal = bool(sum_over_processes(signal))
        self._signal = False
        self.clock.start("push")
        sampled_with = self.sync.version
        self.sync.push(moved=self.step_learning_rate > 0)
        self.clock.start("monitor")
        self.watch.end_step(self.state.global_step + 1, sampled_with)

    @property
    def base_sha256(self) -> str:
        """Hash of the base's bytes, read once; every process must ask."""
        if self._fingerprint is None:
            self._fingerprint = self._base_fingerprint()
        return self._fingerprint

    @property
    def step_learning_rate(self) -> float:
        """0 also where all samples of a prompt have equal rewards: nothing has to move then."""
        return super().step_learning_rate if self._step_had_signal else 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what :mod:`k3tune.run_log` lists."""
        if "loss" in logs:
            tokens = int(self.state.num_input_tokens_seen) - self._logged_tokens
            self._logged_tokens += tokens
            logs |= self.step_metrics(logs, tokens)
            logs |= {
                "adapter_version": self.sync.version,
                "unchanged_pushes": self.sync.num_unchanged,
            }
        super().log(logs, start_time)

    def counters(self) -> dict[str, Any]:
        """Place among the samples, version, and the state of the monitor's tests."""
        return {
            "micro_steps": self.micro_steps,
            "adapter_version": self.sync.version,
            "unchanged_pushes": self.sync.num_unchanged,
            "watch": self.watch.state(),
        }

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Go on counting, and make the restored adapter the live one."""
        self.micro_steps = counters["micro_steps"]
        generate_every = (self.args.steps_per_generation or 1) * self.args.num_iterations
        if self.micro_steps % generate_every:
            logger.warning(
                "the checkpoint lies between the steps that share a generation: the rest of it is "
                "sampled again, by the policy as it is now"
            )
        self.sync.num_unchanged = counters["unchanged_pushes"]
        self.sync.push(moved=False, at_least=counters["adapter_version"])
        self.watch.restore(counters["watch"])
        self._logged_tokens = int(self.state.num_input_tokens_seen)

    def _check_versions(self, rollouts: Sequence[Rollout]) -> None:
        stale = [r.adapter_version for r in rollouts if r.adapter_version != self.sync.version]
        if stale and self.rollout.on_stale_version == "error":
            raise RolloutError(
                f"{len(stale)} of {len(rollouts)} samples came from adapter version "
                f"{', '.join(map(str, sorted(set(stale))))}, expected {self.sync.version}, which "
                "was pushed: is another run using the engine? (set on_stale_version to correct to "
                "weigh them instead)"
            )
        self.count("stale_samples", float(len(stale)))

    def _next_evaluation(self) -> int:
        """A number for each batch of each evaluation, the same in a resumed run."""
        step, number = self._eval_place
        self._eval_place = (
            self.state.global_step,
            number + 1 if step == self.state.global_step else 0,
        )
        return (self.state.global_step << 20) + self._eval_place[1]


class _RolloutBegin(TrainerCallback):
    """Calls the trainer where a run begins, once its log is open."""

    def __init__(self, trainer: K3GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Floor, canary and the first push."""
        self._trainer.begin()


class _RolloutSteps(TrainerCallback):
    """Calls the trainer where an optimizer step begins and where it ends."""

    def __init__(self, trainer: K3GRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Engine and trainer have the same version here."""
        with self._trainer.clock.phase("monitor"):
            self._trainer.watch.begin_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Before the clock of the step stops."""
        self._trainer.after_optimizer_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop after an alarm, where that is asked for."""
        if self._trainer.stopped:
            control.should_save = control.should_log = control.should_training_stop = True


def _guarded(reward: Callable[..., Any]) -> GuardedReward:
    if isinstance(reward, GuardedReward):
        return reward
    if not callable(reward) or isinstance(reward, nn.Module):
        raise ConfigError(
            f"a reward is a {type(reward).__name__}, expected a function of TRL's signature: call "
            "a model inside one"
        )
    defaults = RewardArguments()
    return GuardedReward(
        reward,
        get_callable_name(reward),
        deadline_s=defaults.reward_deadline_s,
        skip_bad=defaults.on_bad_reward == "skip",
    )


def _check_data(
    args: GRPOConfig, train: datasets.Dataset, held_out: datasets.Dataset | None
) -> None:
    needed = {"input_ids", "sample_id", SAMPLE}
    for name, dataset in (("train", train), ("eval", held_out)):
        if dataset is None:
            continue
        if not isinstance(dataset, datasets.Dataset) or not needed <= set(dataset.column_names):
            raise ConfigError(
                f"the {name} dataset is a {type(dataset).__name__} without some of the columns "
                f"{', '.join(sorted(needed))}: make it with k3tune.rl.build_prompts"
            )
    strategy = IntervalStrategy(args.eval_strategy)
    if (held_out is not None) != (strategy != IntervalStrategy.NO):
        given = "not given" if held_out is None else "given"
        raise ConfigError(
            f"eval_strategy is {strategy.value!r} and evaluation data is {given}: expected "
            "eval_path together with eval_strategy steps or epoch"
        )
    prompts = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if len(train) < prompts:
        raise ConfigError(
            f"the data has {len(train)} prompts, expected at least the {prompts} that are sampled "
            "at once: more data, or a smaller per_device_train_batch_size or "
            "gradient_accumulation_steps"
        )
