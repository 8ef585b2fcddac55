"""TRL's SFT trainer over K3: precision left to the model, exact weights of tokens, a full log."""

from collections.abc import Sequence
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer

from k3tune.errors import ConfigError
from k3tune.train.batches import SAMPLE_IDS, SampleIdCollator, describe_samples
from k3tune.train.errors import TrainingError
from k3tune.train.metrics import sum_over_processes
from k3tune.train.options import TOKENISED, check_training
from k3tune.train.run_config import RunConfig
from k3tune.train.trainer import K3Trainer, settle


class K3SFTTrainer(K3Trainer, SFTTrainer):
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
        free_options: Sequence[Any] = (),
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
            free_options: those whose values a resumed run may change.

        Raises:
            ConfigError: for options K3 or a resumable run cannot have, with the reason.
        """
        check_training(args)
        for name, dataset in (("train", train_dataset), ("eval", eval_dataset)):
            if dataset is not None:
                _check_columns(name, dataset, args.packing)
        settle(args)
        args.dataset_kwargs = dict(TOKENISED)
        self.config = RunConfig.resolve(args, options, free_options)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self.set_up()
        # TRL's loss divides by the trained tokens of the whole step when the Trainer counts them
        self.model_accepts_loss_kwargs = True
        self.data_collator = SampleIdCollator(self.data_collator)
        self._trained_tokens: Tensor | int = 0
        self._logged_tokens = 0
        self._eval_sums: Tensor | int = 0

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and its trained tokens over all processes."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._trained_tokens = self._trained_tokens + (0 if num_items is None else num_items)
        return batches, num_items

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
            logs |= self._sft_metrics(logs)
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

    def _sft_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        tokens = self._total_train_tokens - self._logged_tokens
        self._logged_tokens = self._total_train_tokens
        trained, self._trained_tokens = int(self._trained_tokens), 0
        return {**self.step_metrics(logs, tokens), "trained_tokens": trained}


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
