"""What k3tune's trainers share beside resuming: groups of factors, the step's clock, the log."""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback, TrainingArguments
from transformers.integrations import is_tensorboard_available

from k3tune.errors import ConfigError
from k3tune.lora import adapter_parameters
from k3tune.lora.inject import base_of
from k3tune.parallel.expert_parallel import check_zero, expert_parallel_of, split_groups
from k3tune.parallel.gradient_order import GradientOrder
from k3tune.parallel.traffic import KINDS
from k3tune.parallel.trunk_loading import sharded_trunk
from k3tune.train.callbacks import (
    AdapterCheck,
    LogBeforeSave,
    RunFiles,
    ShortProgress,
    StepEnds,
    Termination,
)
from k3tune.train.metrics import (
    PHASES,
    GradientNorms,
    RouterLoad,
    StepClock,
    flat,
    peak_memory_bytes,
    sum_over_processes,
)
from k3tune.train.options import AUTOCAST_REASON
from k3tune.train.resumable import ResumableTrainer
from k3tune.train.throughput import device_peak, flops_per_token

logger = logging.getLogger(__name__)

ZERO_STAGES = (1, 2)


class K3Trainer(ResumableTrainer):
    """A resumable trainer of an adapter on the frozen base, measured and logged.

    A subclass calls :meth:`set_up` once TRL's trainer is made.

    Attributes:
        phases: of a step, in the order they are timed; logged as ``<phase>_s``.
        run_files: the run's log.
    """

    phases: ClassVar[tuple[str, ...]] = PHASES

    def set_up(self) -> None:
        """Check the launch, and hang clock, counters and callbacks on the trainer.

        Raises:
            ConfigError: for a launch that would change precision or that checkpoints do not cover.
        """
        self._check_launch()
        self.router_load = RouterLoad(base_of(self.model).model)
        self.clock = StepClock(self.args.device, self.phases)
        self.gradient_norms: GradientNorms | None = None
        self.run_files = RunFiles(self)
        self._flops_per_token = flops_per_token(self.model)
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ShortProgress)
        # the log comes last: it writes what the others decide
        for callback in (*self.own_callbacks(), self.run_files):
            self.add_callback(callback)

    def own_callbacks(self) -> list[TrainerCallback]:
        """Those beside the log, in order."""
        return [StepEnds(self.clock), AdapterCheck(self), Termination(self), LogBeforeSave()]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """One parameter group a target group, named after it."""
        if self.optimizer is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            # those that bring their own parameters update them in their own ways
            if not isinstance(optimizer_class, type) or options.keys() & {
                "params",
                "model",
                "optimizer_dict",
            }:
                raise ConfigError(
                    f"optim is {self.args.optim!r}, expected one that steps over parameter groups, "
                    "such as adamw_torch"
                )
            groups = [
                {
                    "params": list(parameters.values()),
                    "name": name,
                    "target": name,
                    "weight_decay": self.args.weight_decay,
                }
                for name, parameters in adapter_parameters(self.model).items()
            ]
            if expert_parallel_of(self.model) is not None:
                groups = split_groups(groups)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, timed."""
        with self.clock.phase("data"):
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One batch, timed."""
        if self.gradient_norms is None:
            optimizer = self.optimizer_view.optimizer
            self.gradient_norms = GradientNorms(optimizer, partitioned=self.is_deepspeed_enabled)
            if self._adds_gradients_as_they_come:
                order = GradientOrder(self.optimizer_view.parameters, self.args.device)
                optimizer.register_step_pre_hook(lambda *_: order.check())
            optimizer.register_step_pre_hook(lambda *_: self.clock.start("optimizer"))
        self.clock.start("forward_backward")
        return super().training_step(*args, **kwargs)

    @property
    def end_reason(self) -> str:
        """Why training ended, for the log."""
        return "terminated" if self.terminated else "finished"

    @property
    def step_learning_rate(self) -> float:
        """Learning rate of the optimizer step that was just taken; 0 if nothing had to move."""
        rate: float = self.optimizer_view.optimizer.param_groups[0]["lr"]
        return rate

    def step_metrics(self, logs: dict[str, float], tokens: int) -> dict[str, float]:
        """Times, speed, memory, gradient norms and router load since the last call.

        Called once a log, on every process.

        Args:
            logs: what the Trainer logs.
            tokens: that all processes have run through the model since the last call.
        """
        seconds, steps = self.clock.take()
        tokens_per_s = tokens / sum(seconds.values())
        values: dict[str, float] = {
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "peak_memory_bytes": peak_memory_bytes(self.args.device),
            **{f"{name}_s": spent / steps for name, spent in seconds.items()},
        }
        peak = device_peak(self.args.device)
        if peak is not None:
            per_device = tokens_per_s / self.args.world_size
            values["mfu"] = per_device * self._flops_per_token / peak
        assert self.gradient_norms is not None, f"{self.state.global_step=}"
        values |= flat("grad_norm", self.gradient_norms.take(logs.get("grad_norm")))
        load = self.router_load.take()
        if load:
            values |= {"router_load": max(load.values()), **flat("router_load", load)}
        parallel = expert_parallel_of(self.model)
        if parallel is not None:
            counts = torch.tensor(parallel.traffic.take(), device=self.args.device)
            total = (sum_over_processes(counts).double() / steps).tolist()
            names = [*(f"exchange_bytes/{kind}" for kind in KINDS), "exchange_messages"]
            values |= dict(zip(names, total, strict=True))
        trunk = sharded_trunk(self.model)
        if trunk is not None:
            gathered = trunk.take_counts()
            values["trunk_received_bytes"] = gathered.received_bytes / steps
            values["trunk_prefetch_hits"] = gathered.hit_rate
            values["trunk_resident_bytes"] = trunk.resident_bytes
        return values

    @property
    def _adds_gradients_as_they_come(self) -> bool:
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return plugin is not None and plugin.zero_stage == 2 and self.args.world_size > 1

    def _check_launch(self) -> None:
        """Refuse launches that would change precision or that checkpoints do not cover."""
        if self.accelerator.mixed_precision != "no":
            raise ConfigError(
                f"accelerate's mixed_precision is {self.accelerator.mixed_precision!r}, expected "
                f"'no'; as for bf16, {AUTOCAST_REASON}"
            )
        if self.args.deepspeed and not self.is_deepspeed_enabled:
            raise ConfigError(
                "deepspeed is set but this launch does not use it: launch with accelerate and a "
                "config file of distributed_type DEEPSPEED, or leave it out"
            )
        parallel = expert_parallel_of(self.model)
        if self.is_deepspeed_enabled:
            plugin = self.accelerator.state.deepspeed_plugin
            if parallel is not None:
                check_zero(plugin.zero_stage, parallel.group.size)
            check_deepspeed(plugin)
        elif parallel is not None:
            raise ConfigError(
                "the model is expert parallel but this launch does not use DeepSpeed, which alone "
                "averages the gradients of each expert over its own copies: launch with accelerate "
                "and a config file of distributed_type DEEPSPEED"
            )


def check_deepspeed(plugin: Any) -> None:
    """Refuse a DeepSpeed plugin's config that would change precision or optimizer.

    Raises:
        ConfigError: naming the setting, its value and the reason.
    """
    if plugin.zero_stage not in ZERO_STAGES:
        raise ConfigError(
            f"zero_stage is {plugin.zero_stage}, expected 1 or 2: stage 3 would gather the packed "
            "experts of every layer on every GPU, stage 0 does no more than a launch without "
            "DeepSpeed"
        )
    config = plugin.deepspeed_config
    for name in ("bf16", "fp16", "torch_autocast"):
        enabled = config.get(name, {}).get("enabled", False)
        if enabled and enabled != "auto":
            raise ConfigError(f"DeepSpeed's {name}.enabled is {enabled!r}, {AUTOCAST_REASON}")
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ConfigError(
                f"the DeepSpeed config has an {name!r} section, expected none: optim, "
                "learning_rate and lr_scheduler_type say it"
            )
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        raise ConfigError(
            f"offload_optimizer.device is {offload['device']!r}, expected none: checkpoints do not "
            "cover an offloaded optimizer"
        )


def settle(args: TrainingArguments) -> None:
    """Set what a run of K3 has one right value for, in place."""
    args.data_seed = args.seed if args.data_seed is None else args.data_seed
    args.remove_unused_columns = args.logging_nan_inf_filter = False
    if args.ddp_find_unused_parameters is None:
        # every factor is in every forward, an expert's without tokens too
        args.ddp_find_unused_parameters = False
    # TensorBoard is on where it is installed; a tracker with an account must be there if asked
    trackers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    if "tensorboard" in trackers and not is_tensorboard_available():
        logger.warning("report_to names tensorboard, which is not installed: left out")
        args.report_to = [name for name in trackers if name != "tensorboard"]
