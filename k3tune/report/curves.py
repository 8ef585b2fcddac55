"""The plots over steps: which fields of the log, under which title, and how to read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from k3tune.report.plot import SECTIONS, Band, Line, Mark, Plot
from k3tune.report.reading import Run
from k3tune.report.table import Columns
from k3tune.report.thinning import thin
from k3tune.report.verdict import interval_of

_MISMATCH, _LEARNING, _MACHINE = SECTIONS
# Beyond this they would touch each other on the axis.
_MAX_MARKS = 60


@dataclass(frozen=True)
class Curves:
    """A plot over steps.

    ``fields`` are ``(name in the log, label)``; a name that ends with ``*`` stands for all that
    begin so, labelled by what follows. ``source`` names the kind of record. ``floor`` is the field
    of the floor record that is drawn as a band, ``scale`` divides all values, ``bounds`` is what
    the axis covers at least.
    """

    id: str
    section: str
    title: str
    unit: str
    source: str
    fields: tuple[tuple[str, str], ...]
    how: str
    log: bool = False
    floor: str | None = None
    marks: bool = False
    stacked: bool = False
    scale: float = 1.0
    limit: tuple[str, float] | None = None
    bounds: tuple[float, float] | None = None


CURVES = (
    Curves(
        "kl", _MISMATCH, "KL of engine and trainer", "nats a token", "mismatch",
        (("k3", "mean over samples"), ("k3_token_mean", "mean over tokens")),
        "Schulman's k3 at every step. The band is the floor with its 95 % interval, measured "
        "before training: the curve should stay in it. Triangles are alarms.",
        log=True, floor="k3", marks=True,
    ),
    Curves(
        "abs_difference", _MISMATCH, "Logprob difference |r|", "nats", "mismatch",
        (("abs_max", "largest"), ("abs_p95", "95th percentile"), ("abs_mean", "mean")),
        "How far apart trainer and engine are on single tokens. The mean belongs into the floor's "
        "band; the largest is one token's and jumps.",
        log=True, floor="abs_mean",
    ),
    Curves(
        "tests", _MISMATCH, "Sequential tests", "share of the limit", "mismatch",
        (("ewma/ewma_limit", "EWMA"), ("cusum/cusum_limit", "CUSUM")),
        "Both sum up small excesses over many steps. At 1 a test fires and the verdict becomes "
        "drifting.", limit=("fires", 1.0), marks=True, bounds=(0.0, 1.1),
    ),
    Curves(
        "canary", _MISMATCH, "Canary", "nats", "mismatch",
        (("canary_trainer_moved", "trainer moved"), ("canary_engine_moved", "engine moved"),
         ("canary_difference", "difference")),
        "One pinned text, scored by both sides at every step. As the adapter trains both must move "
        "together, and their difference stay flat.", log=True,
    ),
    Curves(
        "is_ratio", _MISMATCH, "Importance ratio", "p(trainer) / p(engine)", "mismatch",
        (("is_max", "largest"), ("is_mean", "mean"), ("is_min", "smallest")),
        "1 everywhere means the samples are on policy. Single far ones are cut by the correction; "
        "a mean away from 1 is a bias.", log=True, limit=("on policy", 1.0), bounds=(0.5, 2.0),
    ),
    Curves(
        "ess", _MISMATCH, "Effective sample size", "share of 1", "mismatch",
        (("ess", "of tokens"), ("ess_sequence", "of samples")),
        "How much of the batch the importance weights leave: 1 is all of it, 0.5 means half the "
        "samples are wasted.", bounds=(0.95, 1.0),
    ),
    Curves(
        "masked", _MISMATCH, "Masked and cut tokens", "share of tokens", "mismatch",
        (("masked_fraction", "masked"), ("truncated_fraction", "ratio cut"),
         ("is_out_of_bounds", "ratio outside 0.5 to 2")),
        "Tokens the importance correction takes out of the loss or whose weight it cuts. Should be "
        "near 0; a rise means the two policies part.", bounds=(0.0, 0.01),
    ),
    Curves(
        "version_lag", _MISMATCH, "Adapter version lag", "versions", "mismatch",
        (("version_lag", "largest lag"), ("stale_samples", "stale samples")),
        "How many versions the oldest sample was behind the trainer. 0 is on policy; more than "
        "configured is a stale adapter.", bounds=(0.0, 1.0),
    ),
    Curves(
        "router_mismatch", _MISMATCH, "Router mismatch", "share", "mismatch",
        (("router_mismatch", "of (token, layer)"), ("router_mismatch_tokens", "of tokens")),
        "Where trainer and engine send a token to different experts. Replaying the engine's "
        "experts makes it 0.", bounds=(0.0, 1e-3),
    ),
    Curves(
        "reward", _LEARNING, "Reward", "reward", "train",
        (("reward", "mean"), ("reward_std", "std"), ("reward/*", "")),
        "Should rise. The spread inside groups is what the policy gradient learns from.",
    ),
    Curves(
        "loss", _LEARNING, "Loss", "nats a token", "train+eval",
        (("loss", "training"), ("eval_loss", "evaluation")),
        "For SFT it should fall, and evaluation with it. For RL it hovers around 0 and says "
        "little.",
    ),
    Curves(
        "accuracy", _LEARNING, "Token accuracy", "share of trained tokens", "train+eval",
        (("mean_token_accuracy", "training"), ("eval_mean_token_accuracy", "evaluation")),
        "Share of trained tokens that the model would have chosen itself.",
    ),
    Curves(
        "entropy", _LEARNING, "Entropy", "nats a token", "train", (("entropy", "policy"),),
        "How undecided the policy is. A fall to 0 means it repeats itself and stops exploring.",
    ),
    Curves(
        "groups", _LEARNING, "Groups without a signal", "share", "train",
        (("zero_std_groups", "equal rewards"), ("truncated_fraction", "cut completions")),
        "Groups whose samples all earn the same teach nothing; completions cut at the length limit "
        "may be punished for it. Both should be low.", bounds=(0.0, 0.1),
    ),
    Curves(
        "completion_tokens", _LEARNING, "Completion length", "tokens", "train",
        (("completion_tokens", "mean"), ("completions/max_length", "longest")),
        "A steady rise towards the limit often means that cut answers are not punished.",
    ),
    Curves(
        "grad_norm", _LEARNING, "Gradient norm", "norm before clipping", "train",
        (("grad_norm", "all"), ("grad_norm/*", "")),
        "By group of adapted layers. Spikes are batches that pull hard; a group at 0 is not "
        "training.", log=True,
    ),
    Curves(
        "learning_rate", _LEARNING, "Learning rate", "a step", "train",
        (("learning_rate", "learning rate"),), "The schedule as it ran: warm-up, then the decay.",
    ),
    Curves(
        "step_time", _MACHINE, "Time of a step", "s", "train",
        (("rollout_s", "rollout"), ("forward_backward_s", "forward and backward"),
         ("optimizer_s", "optimizer"), ("reward_s", "rewards"), ("push_s", "adapter push"),
         ("monitor_s", "monitor"), ("data_s", "data")),
        "The parts are stacked: the upper edge is the whole step. The largest part is the one "
        "worth speeding up.", stacked=True,
    ),
    Curves(
        "tokens_per_s", _MACHINE, "Speed", "tokens/s", "train",
        (("tokens_per_s", "training"), ("rollout_tokens_per_s", "rollout")),
        "Tokens of all processes a second. A slow fall often means longer samples.",
        bounds=(0.0, 0.0),
    ),
    Curves(
        "memory", _MACHINE, "Peak memory", "GB", "train",
        (("peak_memory_bytes", "peak of the first process"),),
        "The most this process has held so far. It should be flat after a few steps; a steady rise "
        "is a leak.", scale=1e9, bounds=(0.0, 0.0),
    ),
    Curves(
        "exchange", _MACHINE, "Expert-parallel traffic", "MB a step", "train",
        (("exchange_bytes/*", ""),),
        "What processes send each other for experts that lie elsewhere: dispatch to them, combine "
        "back, and their gradients.", scale=1e6,
    ),
    Curves(
        "trunk_bytes", _MACHINE, "Sharded trunk", "MB", "train",
        (("trunk_received_bytes", "received a step"), ("trunk_resident_bytes", "kept")),
        "What a process holds of the frozen trunk, and what it fetches of the rest in every step.",
        scale=1e6,
    ),
)  # fmt: skip


def curve_plots(runs: Sequence[Run]) -> Iterator[Plot]:
    """Every plot over steps that the logs have numbers for."""
    for spec in CURVES:
        if spec.stacked:
            for number, run in enumerate(runs):
                yield from _plot(spec, {number: run}, alone=len(runs) > 1)
        else:
            yield from _plot(spec, dict(enumerate(runs)), alone=False)


def _plot(spec: Curves, runs: dict[int, Run], alone: bool) -> Iterator[Plot]:
    lines = tuple(line for number, run in runs.items() for line in _lines(spec, number, run))
    if not lines:
        return
    number = next(iter(runs)) if spec.stacked else None
    yield Plot(
        f"{spec.id}_{number}" if alone else spec.id,
        spec.section,
        spec.title,
        spec.unit,
        spec.how,
        "stack" if spec.stacked else "curves",
        log=spec.log,
        lines=lines,
        bands=tuple(_bands(spec, runs)),
        marks=tuple(_marks(runs)) if spec.marks else (),
        limits=(spec.limit,) if spec.limit else (),
        bounds=spec.bounds,
        run=number if alone else None,
    )


def _lines(spec: Curves, number: int, run: Run) -> Iterator[Line]:
    for kind in spec.source.split("+"):
        columns = {"train": run.train, "eval": run.evals, "mismatch": run.mismatch}[kind]
        for pattern, label in spec.fields:
            for name in _names(columns, pattern):
                # what a log counts in other units or as a ratio of two fields
                above, _, below = name.partition("/") if "_limit" in name else (name, "", "")
                values = columns[above] / spec.scale
                if below:
                    with np.errstate(divide="ignore", invalid="ignore"):
                        values = np.where(columns[below] > 0, values / columns[below], np.nan)
                curve = thin(columns.steps, values)
                if curve.steps:
                    thinned = curve.mean != curve.low or curve.mean != curve.high
                    yield Line(
                        number,
                        name,
                        label or name.removeprefix(pattern.removesuffix("*")),
                        curve.steps,
                        list(curve.mean),
                        curve.low if thinned else None,
                        curve.high if thinned else None,
                    )


def _names(columns: Columns, pattern: str) -> list[str]:
    return columns.names(pattern[:-1]) if pattern.endswith("*") else [pattern]


def _bands(spec: Curves, runs: dict[int, Run]) -> Iterator[Band]:
    for number, run in runs.items():
        interval = interval_of((run.floor or {}).get(spec.floor)) if spec.floor else None
        if interval:
            yield Band(number, **interval)


def _marks(runs: dict[int, Run]) -> Iterator[Mark]:
    for number, run in runs.items():
        by_step = {record["step"]: record for record in run.alarms}
        steps = sorted(by_step)
        for step in steps[:: -(-len(steps) // _MAX_MARKS) or 1]:
            yield Mark(number, step, str(by_step[step].get("text") or by_step[step].get("alarm")))
