"""What happens around the steps of a run: its log and config files, SIGTERM, and the LoRA check."""

import logging
import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from k3tune.lora.watch import FactorWatch
from k3tune.run_log import FILE_NAME, RunLogWriter
from k3tune.train.metrics import StepClock, sum_over_processes
from k3tune.train.run_config import git_commit, versions

if TYPE_CHECKING:
    from k3tune.train.resumable import ResumableTrainer
    from k3tune.train.trainer import K3Trainer

logger = logging.getLogger(__name__)

ROUTER_COUNTS_NAME = "router_counts.json"


class RunFiles(TrainerCallback):
    """Writes ``config.yaml`` before the first step and ``run_log.jsonl`` all along.

    With every checkpoint also ``router_counts.json``: rows by layer and expert since the start.
    """

    def __init__(self, trainer: "K3Trainer") -> None:
        self._trainer = trainer
        self._log: RunLogWriter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the log; a resumed run says where it goes on."""
        if not args.should_save:
            return
        config = self._trainer.config
        config.write(self._trainer.output_dir)
        self._log = RunLogWriter(self._trainer.output_dir / FILE_NAME)
        resumed = f"checkpoint-{state.global_step}" if state.global_step else None
        header = {
            "config_sha256": config.sha256,
            "versions": versions(),
            "git_commit": git_commit(),
            "resumed_from": resumed,
            "processes": args.world_size,
            "device": str(args.device),
        }
        self._log.write("run", state.global_step, header)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a record of another kind; nothing where this process does not write."""
        if self._log is not None:
            self._log.write(kind, step, values)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Append what the trackers got."""
        if self._log is None or not logs:
            return
        if "loss" in logs:
            self._log.write("train", state.global_step, {"mfu": None, **logs})
        elif any(name.startswith("eval_") for name in logs):
            self._log.write("eval", state.global_step, logs)
        else:
            values = {"reason": self._trainer.end_reason, **logs}
            self._log.write("end", state.global_step, values)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The log is on the disk as far as the checkpoint goes, router counts beside it."""
        if self._log is not None:
            self._log.sync()
            # since the process started; k3tune placement reads them
            counts = self._trainer.router_load.counts()
            if counts is not None:
                counts.write(self._trainer.output_dir / ROUTER_COUNTS_NAME)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


class LogBeforeSave(TrainerCallback):
    """Logs whenever a checkpoint or an evaluation is due.

    No mean is then cut in two by a checkpoint, and a resumed run's curve equals the other's.
    """

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Steps that save or evaluate also log."""
        control.should_log |= control.should_save or control.should_evaluate

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The same at the end of an epoch."""
        control.should_log |= control.should_save or control.should_evaluate


class Termination(TrainerCallback):
    """SIGTERM ends the run after the step it came in, with a checkpoint.

    Processes agree at every step, so one that got the signal alone takes the others with it.
    """

    def __init__(self, trainer: "ResumableTrainer") -> None:
        self._trainer = trainer
        self._asked = False
        self._previous: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Listen; signals reach a program's main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._ask)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save and stop if any process was asked to."""
        asked = torch.tensor(int(self._asked), device=args.device)
        if int(sum_over_processes(asked)):
            logger.warning("SIGTERM: saving step %d and stopping", state.global_step)
            self._trainer.terminated = state.global_step < state.max_steps
            control.should_save = control.should_log = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the signal as it was."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True


class AdapterCheck(TrainerCallback):
    """Fails a run whose factors do not train, by the end of its second step."""

    def __init__(self, trainer: "K3Trainer") -> None:
        self._trainer = trainer
        self._watch: FactorWatch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin to watch."""
        self._watch = FactorWatch(self._trainer.model)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check once two steps are done; the scheduler has not moved on yet."""
        if self._watch is not None and self._watch.report is None:
            self._watch.after_step(self._trainer.step_learning_rate)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop watching a run that ended before."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class StepEnds(TrainerCallback):
    """Tells the clock where an optimizer step ends; logging, saving and evaluation come after."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the clock."""
        self._clock.end_step()


class ShortProgress(ProgressCallback):
    """The Trainer's progress bar; the values of single layers and groups go to the log only."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the values of the whole model."""
        shown = {name: value for name, value in (logs or {}).items() if "/" not in name}
        super().on_log(args, state, control, logs=shown, **kwargs)
