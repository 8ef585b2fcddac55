"""TRL's SFT trainer over K3: precision left to the model, exact weights of tokens, a full log."""

import logging
from collections.abc import Sequence
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProgressCallback, TrainerCallback
from transformers.integrations import is_tensorboard_available
from trl import SFTConfig, SFTTrainer

from k3tune.errors import ConfigError
from k3tune.lora import adapter_parameters
from k3tune.lora.inject import base_of
from k3tune.train.batches import SAMPLE_IDS, SampleIdCollator, describe_samples
from k3tune.train.callbacks import (
    AdapterCheck,
    LogBeforeSave,
    RunFiles,
    ShortProgress,
    StepEnds,
    Termination,
)
from k3tune.train.errors import TrainingError
from k3tune.train.metrics import (
    GradientNorms,
    RouterLoad,
    StepClock,
    flat,
    peak_memory_bytes,
    sum_over_processes,
)
from k3tune.train.options import AUTOCAST_REASON, TOKENISED, check_training
from k3tune.train.resumable import ResumableTrainer
from k3tune.train.run_config import RunConfig
from k3tune.train.throughput import device_peak, flops_per_token

logger = logging.getLogger(__name__)

ZERO_STAGES = (1, 2)


class K3SFTTrainer(ResumableTrainer, SFTTrainer):
    """Fine-tunes an adapter on tokenised samples.

    The loss of an optimizer step is the mean over its trained tokens, whatever the batches and
    processes they came in. Precision is the model's own: autocast, and the trainers' bf16 and
    fp16 switches, are refused.
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig,
        train_dataset: datasets.Dataset,
        eval_dataset: datasets.Dataset | None = None,
        *,
        processing_class: PreTrainedTokenizerBase,
        callbacks: list[TrainerCallback] | None = None,
        options: Sequence[Any] = (),
    ) -> None:
        """Set a run up.

        Args:
            model: from :func:`k3tune.lora.attach_lora`, or loaded with ``trainable=True``.
            args: TRL's, ``bf16`` set to false. Set here: ``data_seed`` (to the seed),
                ``remove_unused_columns``, ``logging_nan_inf_filter``, ``dataset_kwargs``,
                ``ddp_find_unused_parameters``.
            train_dataset, eval_dataset: columns ``input_ids`` and ``labels``; packed rows
                ``seq_lengths`` too; ``sample_id`` or ``sample_ids`` to name samples in errors.
            processing_class: the tokenizer.
            callbacks: beside k3tune's own.
            options: dataclasses of :mod:`k3tune.arguments` to write into ``config.yaml``.

        Raises:
            ConfigError: for options K3 or a resumable run cannot have, with the reason.
        """
        check_training(args)
        for name, dataset in (("train", train_dataset), ("eval", eval_dataset)):
            if dataset is not None:
                _check_columns(name, dataset, args.packing)
        _settle(args)
        self.config = RunConfig.resolve(args, options)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self._check_launch()
        # TRL's loss divides by the trained tokens of the whole step when the Trainer counts them
        self.model_accepts_loss_kwargs = True
        self.data_collator = SampleIdCollator(self.data_collator)
        self.router_load = RouterLoad(base_of(self.model).model)
        self.clock = StepClock(self.args.device)
        self.gradient_norms: GradientNorms | None = None
        self._trained_tokens: Tensor | int = 0
        self._logged_tokens = 0
        self._eval_sums: Tensor | int = 0
        self._flops_per_token = flops_per_token(self.model)
        self._add_own_callbacks()

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
                    "weight_decay": self.args.weight_decay,
                }
                for name, parameters in adapter_parameters(self.model).items()
            ]
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and its trained tokens over all processes."""
        with self.clock.phase("data"):
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._trained_tokens = self._trained_tokens + (0 if num_items is None else num_items)
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One batch, timed."""
        if self.gradient_norms is None:
            optimizer = self.optimizer_view.optimizer
            self.gradient_norms = GradientNorms(optimizer, partitioned=self.is_deepspeed_enabled)
            optimizer.register_step_pre_hook(lambda *_: self.clock.start("optimizer"))
        self.clock.start("forward_backward")
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """TRL's loss, with a batch that cannot be learnt from refused before its backward.

        Raises:
            TrainingError: naming the batch's samples, if no token is trained or the loss is not
                finite.
        """
        sample_ids = inputs.pop(SAMPLE_IDS, None)
        num_trained = (inputs["labels"][..., 1:] != -100).sum()
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = (result[0] if return_outputs else result).detach()
        # both in one wait for the device
        values = torch.stack([loss.double(), num_trained.double()])
        value, count = values.tolist()
        if not count:
            raise TrainingError(
                f"step {self.state.global_step + 1}: expected a trained token in every batch, "
                f"found none in one {describe_samples(sample_ids)}: all labels are -100"
            )
        if not value - value == 0:
            raise TrainingError(
                f"step {self.state.global_step + 1}: the loss is {value}, expected a finite one, "
                f"in a batch {describe_samples(sample_ids)}: lower the learning rate or look at "
                "these samples; the last checkpoint is from before"
            )
        if not self.model.training:
            self._eval_sums = self._eval_sums + torch.stack([values[0] * values[1], values[1]])
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what :mod:`k3tune.run_log` lists, and weigh eval batches by their tokens."""
        prefix = next((name for name in logs if name.endswith("_loss") and "eval" in name), None)
        if "loss" in logs:
            logs |= self._step_metrics(logs)
        elif prefix is not None and isinstance(self._eval_sums, Tensor):
            total, count = sum_over_processes(self._eval_sums).tolist()
            logs[prefix] = total / count
            self._eval_sums = 0
        super().log(logs, start_time)

    def counters(self) -> dict[str, Any]:
        """TRL counts tokens from the start of the process."""
        return {"num_tokens": self._total_train_tokens}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Go on counting."""
        self._total_train_tokens = self._logged_tokens = counters["num_tokens"]

    def _step_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        """Called once a log, on every process."""
        seconds, steps = self.clock.take()
        tokens = self._total_train_tokens - self._logged_tokens
        self._logged_tokens = self._total_train_tokens
        trained, self._trained_tokens = int(self._trained_tokens), 0
        tokens_per_s = tokens / sum(seconds.values())
        values: dict[str, float] = {
            "tokens": tokens,
            "trained_tokens": trained,
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
        return values

    def _add_own_callbacks(self) -> None:
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ShortProgress)
        # the log comes last: it writes what the others decide
        own = (StepEnds(self.clock), AdapterCheck(self), Termination(self), LogBeforeSave())
        for callback in (*own, RunFiles(self)):
            self.add_callback(callback)

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
        if self.is_deepspeed_enabled:
            check_deepspeed(self.accelerator.state.deepspeed_plugin)


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


def _settle(args: SFTConfig) -> None:
    """Set what a run of K3 has one right value for, in place."""
    args.data_seed = args.seed if args.data_seed is None else args.data_seed
    args.remove_unused_columns = args.logging_nan_inf_filter = False
    args.dataset_kwargs = dict(TOKENISED)
    if args.ddp_find_unused_parameters is None:
        # every factor is in every forward, an expert's without tokens too
        args.ddp_find_unused_parameters = False
    # TensorBoard is on where it is installed; a tracker with an account must be there if asked
    trackers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    if "tensorboard" in trackers and not is_tensorboard_available():
        logger.warning("report_to names tensorboard, which is not installed: left out")
        args.report_to = [name for name in trackers if name != "tensorboard"]


def _check_columns(name: str, dataset: datasets.Dataset, packed: bool) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"the {name} dataset is a {type(dataset).__name__}, expected a datasets.Dataset: a run "
            "resumes by the rows' places"
        )
    needed = {"input_ids", "labels", *(["seq_lengths"] if packed and name == "train" else [])}
    if missing := sorted(needed - set(dataset.column_names)):
        raise ConfigError(
            f"the {name} dataset has columns {', '.join(dataset.column_names)}, expected "
            f"{', '.join(missing)} too: tokenise it with k3tune.data"
            + (", and pack it" if "seq_lengths" in missing else "")
        )
