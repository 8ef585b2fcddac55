"""Measure the kernels against their peers and the machine's ceilings.

    python kernels/bench/run.py                    # every shape this machine has the memory for
    python kernels/bench/run.py --small            # tiny shapes: a minute on a CPU
    python kernels/bench/run.py --op moe_lora --output-dir out

Writes ``bench.json`` and ``bench.md``. A candidate whose result or gradients differ from ours is
reported with the difference and not timed.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import roofline
import torch
from registry import SHAPES, WORKLOADS
from timing import interleaved, peak_bytes
from workload import OURS, PASSES, Candidate, Shape, Workload

from k3tune_kernels import dispatch
from report import Row, markdown

# Relative L2 to our result above which a candidate computes something else; the operands are bf16.
AGREEMENT = 2e-2

Results = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: torch.device
    dtype: torch.dtype
    rounds: int


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny shapes only")
    parser.add_argument("--op", choices=sorted(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--shape", help="only shapes whose name contains this")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each candidate")
    parser.add_argument("--output-dir", type=Path, default=Path("bench_results"))
    return parser.parse_args(arguments)


def available_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def one_pass(workload: Workload, candidate: Candidate, name: str) -> Callable[[], Results]:
    """A call of one pass: the result, and with the backward pass the leaves' gradients."""

    def forward() -> Results:
        with torch.no_grad():
            return (candidate.run(),)

    def forward_and_backward() -> Results:
        result = candidate.run()
        gradients = torch.autograd.grad(
            result, workload.leaves, workload.grad.to(result.dtype), allow_unused=True
        )
        return result.detach(), *gradients

    return forward if name == PASSES[0] else forward_and_backward


def relative_difference(actual: Results, expected: Results) -> float:
    """The largest relative L2 over the result and its gradients."""
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            continue
        size = e.double().norm()
        distance = (a.double() - e.double()).norm() / size.clamp(min=1e-300)
        # a NaN must not pass for a small difference
        worst = max(worst, distance.nan_to_num(nan=torch.inf).item())
    return worst


def compare(
    calls: dict[str, Callable[[], Results]], candidates: list[Candidate]
) -> tuple[dict[str, float], dict[str, str]]:
    """Run each candidate once: differences to ours, and reasons not to time some."""
    differences: dict[str, float] = {}
    refused: dict[str, str] = {}
    for candidate in candidates:
        try:
            results = calls[candidate.name]()
        except Exception as error:
            if candidate.name == OURS:
                raise
            refused[candidate.name] = f"failed: {type(error).__name__}: {error}"
            continue
        difference = relative_difference(results, calls[candidate.same_as]())
        differences[candidate.name] = difference
        if difference > AGREEMENT:
            refused[candidate.name] = f"differs from {candidate.same_as} by {difference:.1e}"
    return differences, refused


def measure_pass(
    shape: Shape, workload: Workload, name: str, ceilings: roofline.Ceilings, options: Options
) -> list[Row]:
    """Rows of all candidates for one pass of one shape."""
    candidates = [c for c in workload.candidates if c.differentiable or name == PASSES[0]]
    calls = {c.name: one_pass(workload, c, name) for c in candidates}
    differences, refused = compare(calls, candidates)
    timed = {n: call for n, call in calls.items() if n not in refused}
    timings = interleaved(timed, options.device, options.rounds)
    cost, ours = workload.costs[name], timings[OURS].median_s
    rows = []
    for candidate, timing in timings.items():
        seconds = timing.median_s
        rows.append(
            Row(
                op=shape.op,
                shape=shape.name,
                pass_name=name,
                candidate=candidate,
                timing=timing,
                ratio_to_ours=seconds / ours,
                bytes_per_s=cost.bytes / seconds,
                bandwidth_fraction=cost.bytes / seconds / ceilings.read_write_bytes,
                flops_per_s=cost.flops / seconds,
                arithmetic_fraction=cost.flops / seconds / ceilings.matmul_flops,
                peak_bytes=peak_bytes(calls[candidate], options.device),
                difference=differences[candidate],
            )
        )
    reasons = refused | workload.absent
    rows += [Row(shape.op, shape.name, name, n, not_timed=reason) for n, reason in reasons.items()]
    return rows


def measure_shape(shape: Shape, ceilings: roofline.Ceilings, options: Options) -> list[Row]:
    """Rows of all passes of one shape, or one that says why there are none."""
    free = available_bytes(options.device)
    if shape.needed_bytes > free:
        reason = f"needs about {shape.needed_bytes / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        return [Row(shape.op, shape.name, PASSES[0], OURS, not_timed=reason)]
    torch.manual_seed(0)
    workload = WORKLOADS[shape.op](shape.sizes, options.device, options.dtype)
    return [
        row for name in PASSES for row in measure_pass(shape, workload, name, ceilings, options)
    ]


def main(arguments: list[str]) -> None:
    """Measure, then write the two files."""
    chosen = parse_arguments(arguments)
    options = Options(torch.device(chosen.device), getattr(torch, chosen.dtype), chosen.rounds)
    ceilings = roofline.measure(options.device, options.dtype, options.rounds)
    rows: list[Row] = []
    backends: dict[str, str] = {}
    for shape in SHAPES:
        wanted = (not chosen.op or shape.op in chosen.op) and (chosen.shape or "") in shape.name
        if not wanted or (chosen.small and not shape.small):
            continue
        print(f"{shape.op}: {shape.name}", file=sys.stderr, flush=True)
        rows += measure_shape(shape, ceilings, options)
        choice = dispatch.explain(shape.op)
        if isinstance(choice, dispatch.Choice):
            backends[shape.op] = f"{choice.backend} ({choice.reason})"
    about = {
        "machine": roofline.machine_name(options.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dtype": chosen.dtype,
        "rounds": chosen.rounds,
        "command": "python kernels/bench/run.py " + " ".join(arguments),
        "backends": backends,
        "ceilings": asdict(ceilings),
    }
    chosen.output_dir.mkdir(parents=True, exist_ok=True)
    results = {"about": about, "results": [asdict(row) for row in rows]}
    (chosen.output_dir / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    (chosen.output_dir / "bench.md").write_text(markdown(about, rows))
    print(f"wrote bench.json and bench.md to {chosen.output_dir}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
