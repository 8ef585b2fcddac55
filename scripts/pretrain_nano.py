"""Pre-train k3-nano from scratch on the CPU and write it in the published layout.

    python scripts/pretrain_nano.py --out FOLDER

Seeded; an interrupted run started again with the same command goes on where it last saved.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import k3tune
from evaluate_nano import Score, evaluate, table
from k3tune.data.chat import END_OF_MESSAGE, NO_TARGET
from k3tune.data.tokenizer import K3Tokenizer, write_tokenizer
from nano_card import write_card
from nano_corpus import SPECIAL_TOKENS, Corpus, Document, Mix, pieces
from nano_model import VOCAB_SIZE, build_model, count_parameters, nano_config, write_base
from nano_optimizer import NanoOptimizer, QuantileBalancer, Rates
from nano_tasks import TASKS, draw_problems

_CLIP = 1.0
_WARMUP_STEPS = 10
# Rows with as many multiples of this run together: direct answers end below 64, worked ones above.
_GROUP_TOKENS = 64
_SAVE_EVERY = 25
_STATE_FILE = "training.safetensors"


class Plan(NamedTuple):
    """Everything the result depends on besides the code and the machine's rounding."""

    steps: int = 450
    documents: int = 40
    seed: int = 0
    mix: Mix = Mix()
    rates: Rates = Rates()


class Batch(NamedTuple):
    """Documents of similar length as rows ``[B, T]``; ``real`` is False at padding."""

    ids: Tensor
    labels: Tensor
    real: Tensor


class Progress(NamedTuple):
    """How far a run is: steps, tokens, seconds (of all its parts), smoothed loss."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None


class Training:
    """The whole state of a run: model, optimizer, balancer, progress.

    Args:
        plan: what to train.
        tokenizer: of the base.
    """

    def __init__(self, plan: Plan, tokenizer: K3Tokenizer) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.config = nano_config(
            {
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.control_id(END_OF_MESSAGE),
                "pad_token_id": tokenizer.pad_token_id,
            }
        )
        self.model = build_model(self.config)
        self.optimizer = NanoOptimizer(self.model, plan.rates)
        self.balancer = QuantileBalancer(self.model)
        self.corpus = Corpus(tokenizer, plan.mix, plan.seed)
        self.progress = Progress()

    def step(self) -> float:
        """Train on the next documents and return their loss.

        Raises:
            FloatingPointError: if it is not finite.
        """
        started, plan, done = time.monotonic(), self.plan, self.progress
        batches = make_batches(self.corpus.step(done.steps, plan.documents))
        targets = sum(int((batch.labels[:, 1:] != NO_TARGET).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            self.balancer.counted = batch.real
            loss = self.model(
                input_ids=batch.ids, labels=batch.labels, num_items_in_batch=targets
            ).loss
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss of step {done.steps} is {total}")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(trained, _CLIP, foreach=True)
        warm = min(1.0, (done.steps + 1) / _WARMUP_STEPS)
        self.optimizer.step(warm * (1 - done.steps / plan.steps))
        self.balancer.step()
        self.progress = Progress(
            done.steps + 1,
            done.tokens + sum(int(batch.real.sum()) for batch in batches),
            done.seconds + time.monotonic() - started,
            total if done.loss is None else 0.95 * done.loss + 0.05 * total,
        )
        return total

    def save(self, path: Path) -> None:
        """Write the state whole or not at all."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        tensors["load"] = self.balancer.load_LE
        metadata = {"plan": json.dumps(self.plan), "progress": json.dumps(self.progress)}
        temporary = path.with_name(f".{path.name}")
        save_file(tensors, temporary, metadata=metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)

    def resume(self, path: Path) -> None:
        """Take up the state another run of the same plan saved.

        Raises:
            ValueError: if the plan was another.
        """
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata["plan"] != json.dumps(self.plan):
            raise ValueError(
                f"{path} was saved by another plan ({metadata['plan']}): remove it to start anew"
            )
        self.model.load_state_dict(_part(tensors, "model."))
        self.optimizer.load_state(_part(tensors, "optimizer."))
        self.balancer.load_LE.copy_(tensors["load"])
        self.progress = Progress(*json.loads(metadata["progress"]))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def make_batches(documents: list[Document]) -> list[Batch]:
    """One document a row, rows of similar length together.

    A row is filled up with the start of another document: a constant there would crowd into the
    same few experts. Nothing reads the filling, for K3 is causal and it has no target.
    """
    ordered = sorted(documents, key=lambda document: len(document.input_ids))
    groups = groupby(ordered, key=lambda document: -(-len(document.input_ids) // _GROUP_TOKENS))
    return [_batch(list(group)) for _, group in groups]


def _batch(documents: list[Document]) -> Batch:
    length = len(documents[-1].input_ids)
    ids = torch.empty(len(documents), length, dtype=torch.int64)
    labels = torch.full_like(ids, NO_TARGET)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, document in enumerate(documents):
        end = len(document.input_ids)
        ids[row, :end] = torch.tensor(document.input_ids)
        ids[row, end:] = torch.tensor(documents[row - 1].input_ids + documents[-1].input_ids)[
            : length - end
        ]
        labels[row, :end] = torch.tensor(document.labels)
        real[row, :end] = True
    return Batch(ids, labels, real)


def pretrain(plan: Plan, folder: Path) -> Training:
    """Train to the end, from the last saved state if there is one, and write the base.

    Args:
        plan: what to train.
        folder: gets the base, in place of what it held. Until then all is in ``<folder>.partial``.

    Returns:
        The finished training.
    """
    work = folder.with_name(f"{folder.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    assert len(pieces()) + 256 + len(SPECIAL_TOKENS) == VOCAB_SIZE, f"{len(pieces())=}"
    write_tokenizer(work, pieces(), SPECIAL_TOKENS)
    training = Training(plan, K3Tokenizer.from_pretrained(work))
    state = work / _STATE_FILE
    if state.exists():
        training.resume(state)
    with tqdm(total=plan.steps, initial=training.progress.steps, unit="step", mininterval=1) as bar:
        while training.progress.steps < plan.steps:
            training.step()
            load = training.balancer.load_LE
            bar.set_postfix_str(
                f"loss {training.progress.loss:.3f}, load {load.min():.2f}-{load.max():.2f}",
                refresh=False,
            )
            bar.update()
            if training.progress.steps % _SAVE_EVERY == 0:
                training.save(state)
    write_base(training.model, training.config, work)
    state.unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    work.replace(folder)
    return training


def measure(folder: Path, count: int) -> list[Score]:
    """Scores of the stored base, sampled and greedy."""
    model = k3tune.load_base(folder, dtype=torch.float32)
    tokenizer = K3Tokenizer.from_pretrained(folder)
    problems = [
        problem for task in TASKS for problem in draw_problems(task, "evaluation", count, seed=0)
    ]
    return [
        score
        for temperature in (1.0, 0.0)
        for score in evaluate(model, tokenizer, problems, temperature=temperature)
    ]


def main() -> None:
    """Parse the command line, train, measure, write the model card."""
    parser = argparse.ArgumentParser(description="Pre-train k3-nano and write it.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the base; replaced")
    parser.add_argument("--steps", type=int, default=Plan().steps, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same documents")
    parser.add_argument("--count", type=int, default=512, help="problems a task to measure with")
    arguments = parser.parse_args()
    plan = Plan(steps=arguments.steps, seed=arguments.seed)
    training = pretrain(plan, arguments.out)
    load_average = os.getloadavg()[1]
    scores = measure(arguments.out, arguments.count)
    progress, load = training.progress, training.balancer.load_LE
    write_card(
        arguments.out,
        parameters=count_parameters(training.model),
        mix=plan.mix,
        training={
            "command": f"python scripts/pretrain_nano.py --steps {plan.steps} --seed {plan.seed}",
            "steps x documents": f"{plan.steps} x {plan.documents}",
            "tokens": f"{progress.tokens:,}",
            "time": f"{progress.seconds / 60:.1f} minutes",
            "threads, load average": f"{torch.get_num_threads()}, {load_average:.1f}",
            "loss (smoothed)": f"{progress.loss:.3f}",
            "expert load (smoothed, 1 is uniform)": f"{load.min():.2f} to {load.max():.2f}",
        },
        scores=table(scores),
    )
    print(table(scores))
    print(f"{training.progress.seconds:.0f} s of training; the card is {arguments.out}/README.md")


if __name__ == "__main__":
    main()
