"""What makes a Trainer resumable without pickle: every private hook of transformers is here.

Written against transformers 5.24 and TRL 1.16, which a test names. The Trainer saves through
``_save_checkpoint`` and loads in four places; here one of them, after everything is prepared,
restores the whole, on one process as under DDP, ZeRO-1 or ZeRO-2.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from k3tune.errors import CheckpointError, ConfigError
from k3tune.lora import adapter_parameters, save_adapter
from k3tune.lora.fingerprint import base_digests, combine_digests
from k3tune.lora.inject import DEFAULT_ADAPTER, adapter_layers
from k3tune.lora.state import Entry, layer_entries, written_slots
from k3tune.parallel.expert_parallel import expert_parallel_of
from k3tune.parallel.gather import FactorRows
from k3tune.parallel.trunk_loading import sharded_trunk, trunk_digests
from k3tune.train.launch import TERMINATED
from k3tune.train.metrics import sum_over_processes
from k3tune.train.optimizer_state import (
    OptimizerView,
    fit_schedule,
    load_optimizer,
    read_rows,
    refresh_master,
    save_optimizer,
)
from k3tune.train.run_config import RunConfig, git_commit, versions
from k3tune.train.state import (
    check_checkpoint,
    checkpoint_path,
    checkpoint_step,
    new_checkpoint,
    newest_checkpoint,
    random_state,
    read_json,
    remove_leftovers,
    remove_old_checkpoints,
    restore_random_state,
    write_json,
)

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"


class ResumableTrainer(Trainer):
    """A Trainer of an adapter whose checkpoints are :mod:`k3tune.train.state` folders.

    Attributes:
        config: the run's resolved options; a checkpoint of other ones is refused.
        terminated: whether SIGTERM ended the run.
    """

    # transformers types these for trainers of every kind
    model: Any
    train_dataset: Any
    optimizer: Any
    lr_scheduler: Any

    config: RunConfig
    terminated: bool = False
    _fingerprint: str | None = None
    _data_sha256: str | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the start or on from a checkpoint.

        Args:
            resume_from_checkpoint: True goes on from the newest complete checkpoint of
                ``output_dir``, and starts where there is none; a path names the checkpoint.
            args, kwargs: the Trainer's other arguments.

        Raises:
            CheckpointError: if the named checkpoint is damaged.
            ConfigError: if it belongs to a run with other options or data.
        """
        if self.args.should_save:
            remove_leftovers(self.output_dir)
        checkpoint: Path | None = None
        if resume_from_checkpoint is True:
            checkpoint = self._newest_checkpoint()
        elif resume_from_checkpoint:
            checkpoint = Path(resume_from_checkpoint)
            check_checkpoint(checkpoint)
        if checkpoint is not None:
            logger.info("going on from %s", checkpoint)
        return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter to ``<output_dir>/adapter``, in FP32, with its provenance."""
        folder = Path(self.output_dir if output_dir is None else output_dir)
        self._find_fingerprint()
        if self.args.should_save or self.factor_rows is not None:
            self._save_adapter(folder / ADAPTER_FOLDER)
        self.accelerator.wait_for_everyone()

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        assert self.args.output_dir is not None, "TRL names one"
        return Path(self.args.output_dir)

    def counters(self) -> dict[str, Any]:
        """What a subclass counts over the whole run, for JSON; equal on all processes."""
        return {}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Take counters of :meth:`counters` back."""

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        return TERMINATED if self.terminated else 0

    @property
    def optimizer_view(self) -> OptimizerView:
        """The optimizer that steps, by parameter name; once training has begun."""
        inner = self.optimizer.optimizer
        parameters = flatten(adapter_parameters(self.model))
        if self.is_deepspeed_enabled:
            return OptimizerView(inner.optimizer, parameters, inner, self.factor_rows)
        return OptimizerView(inner, parameters)

    @property
    def factor_rows(self) -> FactorRows | None:
        """Under expert parallelism: which factors hold rows of this process's experts only."""
        parallel = expert_parallel_of(self.model)
        return None if parallel is None else FactorRows(parallel, self.model, DEFAULT_ADAPTER)

    # ---- private hooks of transformers 5.24 and TRL 1.16 ----

    def _send_telemetry(self) -> None:
        """TRL reports runs to its makers; k3tune reports nothing to anybody."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's is all pickle (optimizer, scheduler, generators, arguments)."""
        step, state = self.state.global_step, self.state
        self.store_flos()
        self._find_fingerprint()
        ranks = self._gather_json(random_state())
        if state.best_global_step:
            best = checkpoint_path(self.output_dir, state.best_global_step)
            if best.is_dir() or state.best_global_step == step:
                state.best_model_checkpoint = str(best)
        if self.args.should_save:
            with new_checkpoint(self.output_dir, step) as folder:
                self._save_adapter(folder / ADAPTER_FOLDER)
                save_optimizer(self.optimizer_view, folder, writes=True)
                write_json(folder / "scheduler.json", self.lr_scheduler.state_dict())
                write_json(folder / "ranks.json", {"ranks": ranks})
                write_json(folder / "run.json", self._progress())
                self._save_trainer_state(folder / TRAINER_STATE_NAME)
            remove_old_checkpoints(
                self.output_dir, self.args.save_total_limit, state.best_model_checkpoint
            )
        else:
            if self.factor_rows is not None:
                self._save_adapter(Path())
            save_optimizer(self.optimizer_view, Path(), writes=False)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the optimizer does not exist, see :meth:`_prepare_for_training`."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Prepare a run as if from the start, then restore adapter, optimizer and scheduler."""
        parallel = expert_parallel_of(self.model)
        with nullcontext() if parallel is None else parallel.starting_engine(self.model):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            self._check_progress(read_json(folder / "run.json"), folder)
            self._restore_adapter(folder)
            view = self.optimizer_view
            load_optimizer(view, folder)
            schedule = read_json(folder / "scheduler.json")
            num_groups = len(view.optimizer.param_groups)
            self.lr_scheduler.load_state_dict(fit_schedule(schedule, num_groups))
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called once the data stands where it stood; the last thing before a resumed step."""
        if checkpoint is None:
            return
        self.restore_counters(read_json(Path(checkpoint) / "run.json")["counters"])
        ranks = read_json(Path(checkpoint) / "ranks.json")["ranks"]
        if len(ranks) != self.args.world_size:
            logger.warning(
                "%s was written by %d processes, this run has %d: random generators start from the "
                "seed (dropout, if any, will differ)",
                checkpoint,
                len(ranks),
                self.args.world_size,
            )
            return
        restore_random_state(ranks[self.args.process_index])

    def _load_best_model(self) -> None:
        """The Trainer's would look for its own files."""
        assert self.state.best_model_checkpoint is not None, f"{self.state.best_metric=}"
        self._restore_adapter(Path(self.state.best_model_checkpoint))

    # ---- their parts ----

    def _newest_checkpoint(self) -> Path | None:
        """The main process reads the files and decides for all."""
        found = newest_checkpoint(self.output_dir) if self.args.process_index == 0 else None
        step = checkpoint_step(found) if found is not None else 0
        step = int(sum_over_processes(torch.tensor(step, device=self.args.device)))
        if not step:
            return None
        folder = checkpoint_path(self.output_dir, step)
        if not folder.is_dir():
            raise CheckpointError(
                f"process {self.args.process_index} does not see {folder}, from which the main "
                "process goes on: put output_dir on a file system that all processes share"
            )
        return folder

    def _save_adapter(self, folder: Path) -> None:
        save_adapter(
            self.model,
            folder,
            version=self.state.global_step,
            dtype=torch.float32,
            overwrite=True,
            base_fingerprint=self._fingerprint,
            gather=self.factor_rows,
            provenance={
                "step": self.state.global_step,
                "config_sha256": self.config.sha256,
                "git_commit": git_commit(),
                "versions": versions(),
            },
        )

    def _find_fingerprint(self) -> None:
        """Read the base once, as it never changes: together where processes hold parts of it."""
        spread = self.factor_rows is not None or sharded_trunk(self.model) is not None
        if self._fingerprint is None and (spread or self.args.should_save):
            self._fingerprint = self._base_fingerprint()

    def _base_fingerprint(self) -> str:
        """Of the whole base, with the digests of experts and trunk that other processes hold."""
        digests, trunk = base_digests(self.model), sharded_trunk(self.model)
        if trunk is not None:
            digests |= trunk_digests(trunk)
        if self.factor_rows is None:
            return combine_digests(digests)
        merged: dict[str, str] = {}
        for other in self._gather_json(digests):
            for label, digest in other.items():
                if merged.setdefault(label, digest) != digest:
                    raise CheckpointError(
                        f"{label} of the base differs between processes, expected the same: was "
                        "it loaded from different files?"
                    )
        return combine_digests(merged)

    def _restore_adapter(self, folder: Path) -> None:
        entries = _adapter_entries(self.model)
        rows = self.factor_rows
        adapter = folder / ADAPTER_FOLDER
        found = set()
        for file in sorted(adapter.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    found.add(key)
                    _copy_entry(entries, key, tensors, rows, adapter)
        if missing := sorted(entries.keys() - found):
            raise CheckpointError(
                f"{adapter} lacks {missing[0]}: resume with the same LoRA options"
            )
        view = self.optimizer_view
        for name in view.parameters:
            refresh_master(view, name)

    def _progress(self) -> dict[str, Any]:
        return {
            "step": self.state.global_step,
            "samples_per_step": self._samples_per_step(),
            "data": {"rows": len(self.train_dataset), "sha256": self._dataset_sha256()},
            "counters": self.counters(),
            "options": self.config.options,
            "versions": versions(),
        }

    def _check_progress(self, saved: dict[str, Any], folder: Path) -> None:
        if saved["samples_per_step"] != self._samples_per_step():
            raise ConfigError(
                f"{folder} was written by a run of {saved['samples_per_step']} rows a step, this "
                f"one has {self._samples_per_step()}: keep per_device_train_batch_size x "
                "gradient_accumulation_steps x processes as they were"
            )
        self.config.compare(saved["options"], folder)
        if saved["data"]["sha256"] != self._dataset_sha256():
            raise ConfigError(
                f"{folder} was written over {saved['data']['rows']} rows of other data than the "
                f"{len(self.train_dataset)} rows here: a resumed run needs the same data"
            )

    def _samples_per_step(self) -> int:
        return (
            self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size
        )

    def _dataset_sha256(self) -> str:
        if self._data_sha256 is None:
            self._data_sha256 = dataset_sha256(self.train_dataset)
        return self._data_sha256

    def _save_trainer_state(self, file: Path) -> None:
        """As the Trainer does it: the state of callbacks beside its own."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                stored: Any = self.state.stateful_callbacks
                name = type(callback).__name__
                if isinstance(stored[name], list):
                    stored[name].append(callback.state())
                else:
                    stored[name] = callback.state()
        self.state.save_to_json(str(file))

    def _gather_json(self, value: Any) -> list[Any]:
        """A JSON value of every process, on all of them."""
        content = np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)
        text = torch.from_numpy(content.copy()).to(self.args.device)[None]
        # a blank is no part of JSON text
        padded = self.accelerator.pad_across_processes(text, dim=1, pad_index=ord(" "))
        rows = self.accelerator.gather(padded).cpu().numpy()
        return [json.loads(row.tobytes()) for row in rows]


def flatten(groups: dict[str, dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Parameters by name, whatever their group."""
    return {name: parameter for group in groups.values() for name, parameter in group.items()}


def dataset_sha256(dataset: datasets.Dataset) -> str:
    """Hash of the token ids of all rows, in order."""
    hasher = hashlib.sha256()
    for batch in dataset.select_columns(["input_ids"]).with_format(None).iter(1000):
        rows: Sequence[Sequence[int]] = batch["input_ids"]
        hasher.update(np.array([len(row) for row in rows], dtype=np.int64).tobytes())
        hasher.update(np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]).tobytes())
    return hasher.hexdigest()


def _adapter_entries(model: nn.Module) -> dict[str, tuple[str, Entry]]:
    """Entries of the adapter's file by key, with the names of their factors."""
    entries = {}
    for name, layer in adapter_layers(model, DEFAULT_ADAPTER).items():
        slots = written_slots(layer, name, DEFAULT_ADAPTER, None)
        for entry in layer_entries(layer, DEFAULT_ADAPTER, slots):
            entries[entry.slot.key] = f"{name}.lora_{entry.slot.half}", entry
    return entries


def _copy_entry(
    entries: dict[str, tuple[str, Entry]],
    key: str,
    file: Any,
    rows: FactorRows | None,
    adapter: Path,
) -> None:
    found = tuple(file.get_slice(key).get_shape())
    name, entry = entries.get(key, ("", None))
    expected = None if entry is None else tuple(entry.value.shape)
    if rows is not None and expected is not None:
        expected = rows.whole_shape(name, expected)
    if entry is None or expected != found:
        raise CheckpointError(
            f"{adapter} holds {key} of shape {found}, expected {expected or 'none'}: resume with "
            "the same LoRA options"
        )
    entry.value.copy_(read_rows(file, key, None if rows is None else rows.held(name)))
