"""Which faults the monitor finds over which floor, and how soon: a Markdown table.

    python scripts/power_table.py [--prompts 24] [--samples 8] [--runs 50] [--out FILE]

For each numerics the floor is measured and k3-nano samples with every fault; runs are then drawn:
each of up to three steps takes some of the prompts with all their samples. A fault is found when an
alarm was raised, named when the first alarm's step has the right cause. "own k3" is what the fault
adds; "ratio" holds it against the floor's upper bound. Without the canary only sampled tokens are
looked at.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3tune.monitor import Floor, FloorMonitor, mismatch
from k3tune.monitor.canary import Canary
from k3tune.monitor.samples import Samples
from nano_lab import FAULTS, NanoLab

CAUSES = {
    "stale": "stale adapter",
    "scale": "adapter scale",
    "expert": "expert",
    "temperature": "temperature",
    "trainer temperature": "temperature",
    "top-p": "top-p",
    "off-by-one": "off-by-one",
    "flips": "routing flips",
}
NUMERICS = {
    "fp32 / fp32": (torch.float32, "none", "none"),
    "bf16 / bf16": (torch.bfloat16, "none", "none"),
    "bf16 + MXFP8 / bf16": (torch.bfloat16, "mxfp8", "none"),
}
# engine's samples serve where the fault is not the engine's sampling
_RESCORED = ("trainer temperature", "off-by-one", "flips")
_VERSION = 2
_STEPS = 3
_CLEAN_STEPS = 200
_PROMPTS_A_STEP = 8


@dataclass(frozen=True)
class Power:
    """A row of the table; shares are of the runs."""

    numerics: str
    fault: str
    own_k3: float
    ratio: float
    found: float
    named: float
    found_with_canary: float
    named_with_canary: float
    steps: float


class Bench:
    """One numerics: its floor, its canary, and samples with every fault."""

    def __init__(self, numerics: str, num_prompts: int, each: int, seed: int) -> None:
        dtype, engine, trainer = NUMERICS[numerics]
        self.numerics = numerics
        self.lab = NanoLab(dtype, engine=engine, trainer=trainer)
        self.each = each
        base_prompts = self.lab.prompts(num_prompts, seed + 1)
        calibration = self.lab.step(None, 0, base_prompts, each=each, seed=seed)
        self.floor = Floor.calibrate(calibration, key={})
        canary = self.lab.make_canary(calibration, base_prompts, each)
        canary.check(1, *self.lab.canary_scores(None, 1))
        self.canary = canary.state()
        self._prompts = self.lab.prompts(num_prompts, seed + 2)
        self._clean = self._sample(None)
        self._seed = seed

    def _sample(self, fault: str | None) -> Any:
        return self.lab.sample(fault, _VERSION, self._prompts, each=self.each, seed=5)

    def samples(self, fault: str | None) -> Samples:
        """Of all prompts."""
        fresh = fault is not None and fault not in _RESCORED
        rollouts = self._sample(fault) if fresh else self._clean
        return self.lab.compare(fault, rollouts, self.each, _VERSION)

    def run(
        self, samples: Samples, fault: str | None, steps: int, rng: Any, *, with_canary: bool
    ) -> tuple[int | None, str | None]:
        """The step of the first alarm, and the cause it was given."""
        canary = Canary.restored(self.canary) if with_canary else None
        monitor = FloorMonitor(self.floor, canary=canary)
        scores = self.lab.canary_scores(fault, _VERSION) if with_canary else None
        prompts = np.unique(samples.prompts)
        for step in range(1, steps + 1):
            chosen = rng.choice(prompts, min(_PROMPTS_A_STEP, len(prompts)), replace=False)
            report = monitor.step(
                rows_of(samples, np.isin(samples.prompts, chosen)),
                adapter_version=_VERSION,
                # later versions of a lasting fault look as the first to a deterministic engine
                canary_scores=scores if step == 1 else None,
            )
            if report.alarms:
                return step, report.mismatch["attribution"]
        return None, None

    def power(self, fault: str, clean_k3: float, runs: int) -> Power:
        """A fault's row."""
        samples = self.samples(fault)
        own = max(mismatch(samples)["k3"] - clean_k3, 0.0)
        rng = np.random.default_rng(self._seed)
        alone = [self.run(samples, fault, _STEPS, rng, with_canary=False) for _ in range(runs)]
        # the canary does not depend on what is drawn
        few = max(1, runs // 10)
        both = [self.run(samples, fault, _STEPS, rng, with_canary=True) for _ in range(few)]
        found = [step for step, _ in alone if step is not None]
        return Power(
            self.numerics,
            fault,
            own,
            own / self.floor.k3.high,
            len(found) / runs,
            sum(cause == CAUSES[fault] for _, cause in alone) / runs,
            sum(step is not None for step, _ in both) / few,
            sum(cause == CAUSES[fault] for _, cause in both) / few,
            float(np.mean(found)) if found else float("nan"),
        )

    def false_alarm(self, samples: Samples) -> int | None:
        """The step of the first alarm in 200 clean ones, if there is one."""
        rng = np.random.default_rng(self._seed + 1)
        step, _ = self.run(samples, None, _CLEAN_STEPS, rng, with_canary=True)
        return step


def rows_of(samples: Samples, rows: Any) -> Samples:
    """Some of the samples."""
    values = {field.name: getattr(samples, field.name) for field in fields(Samples)}
    return Samples(**{n: None if value is None else value[rows] for n, value in values.items()})


def table(rows: Sequence[Power]) -> str:
    """Markdown."""
    lines = [
        "| engine / trainer | fault | own k3 | ratio | found in 3 steps | named | mean steps | "
        "with canary: found | named |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.numerics} | {row.fault} | {row.own_k3:.1e} | {row.ratio:.2g} | {row.found:.0%} | "
        f"{row.named:.0%} | {row.steps:.1f} | {row.found_with_canary:.0%} | "
        f"{row.named_with_canary:.0%} |"
        for row in rows
    ]
    return "\n".join(lines)


def measured(arguments: argparse.Namespace) -> str:
    """The table, and a line a numerics about its floor and its clean steps."""
    rows, notes = [], []
    for numerics in arguments.numerics or NUMERICS:
        bench = Bench(numerics, arguments.prompts, arguments.samples, arguments.seed)
        clean = bench.samples(None)
        clean_k3, floor = mismatch(clean)["k3"], bench.floor.k3
        alarm = bench.false_alarm(clean)
        notes.append(
            f"- {numerics}: floor {floor.value:.1e} [{floor.low:.1e}, {floor.high:.1e}], clean at "
            f"version {_VERSION} {clean_k3:.1e}; "
            + ("no alarm in 200 clean steps" if alarm is None else f"false alarm at step {alarm}")
        )
        print(notes[-1], flush=True)
        for fault in FAULTS:
            rows.append(bench.power(fault, clean_k3, arguments.runs))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return table(rows) + "\n\n" + "\n".join(notes)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure what the monitor finds on k3-nano.")
    parser.add_argument("--prompts", type=int, default=24, help="of the floor and of each fault")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--runs", type=int, default=50, help="drawn for each fault")
    parser.add_argument("--numerics", choices=NUMERICS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    started = time.monotonic()
    text = measured(arguments)
    print(text)
    print(f"{time.monotonic() - started:.0f} s, load average {os.getloadavg()[0]:.1f}")
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
