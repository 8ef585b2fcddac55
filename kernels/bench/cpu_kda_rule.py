"""The native delta rule on this CPU against the chunked form in torch.

    OMP_NUM_THREADS=1 python kernels/bench/cpu_kda_rule.py [--rounds 25]

Processor seconds, first quartiles of rounds in turns: they bear a machine that others use too.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from k3tune_kernels.cpu import library
from k3tune_kernels.kda_rule.chunked import kda_chunked
from k3tune_kernels.kda_rule.cpu_op import kda_rule_cpu

# rows, tokens of a row, heads, head width, tokens of a document
SHAPES = {
    "k3-nano, packed": (8, 256, 6, 32, 60),
    "heads of 128": (1, 1024, 8, 128, 1024),
    "heads of 128, long": (1, 8192, 2, 128, 8192),
}


def operands(
    batch: int, length: int, heads: int, width: int, document: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Unit queries and keys, values, log-decays and betas; and documents of one length."""
    q, k, v, logit = (torch.randn(batch, length, heads, width) for _ in range(4))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = torch.randn(batch, length, heads).sigmoid()
    starts = torch.cat([torch.arange(0, length, document) + row * length for row in range(batch)])
    bounds = torch.cat([starts, torch.tensor([batch * length])])
    return [q, k, v, -5 * (3 * logit).sigmoid(), beta], bounds


def forms(isas: list[str]) -> dict[str, Callable]:
    """What is measured, by name."""

    def native(isa: str) -> Callable:
        return lambda *arguments: kda_rule_cpu(*arguments, None, isa=isa)

    chunked = {"chunked torch": lambda *arguments: kda_chunked(*arguments, None)}
    return {isa: native(isa) for isa in isas} | chunked


def seconds(rule: Callable, tensors: list[torch.Tensor], bounds: torch.Tensor) -> list[float]:
    """Of the forward pass without gradients, and of forward and backward."""
    start = time.process_time()
    with torch.no_grad():
        rule(*tensors, bounds)
    between = time.process_time()
    out, _ = rule(*tensors, bounds)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    return [between - start, time.process_time() - between]


def quartile(values: Sequence[float]) -> float:
    """The first one."""
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def main() -> None:
    """Print one table a shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    rules = forms(library.isas())
    for name, sizes in SHAPES.items():
        tensors, bounds = operands(*sizes)
        tensors = [x.requires_grad_() for x in tensors]
        times: dict[str, list[list[float]]] = {form: [] for form in rules}
        for _ in range(rounds):
            for form, rule in rules.items():
                times[form].append(seconds(rule, tensors, bounds))
        quartiles = {
            form: list(map(quartile, zip(*found, strict=True))) for form, found in times.items()
        }
        print(f"\n{name}: {sizes}, load {os.getloadavg()[0]:.1f}\n")
        print("| | forward ms | chunked / it | with backward ms | chunked / it |")
        print("|---|---|---|---|---|")
        for form, found in quartiles.items():
            cells = [
                f"{1e3 * one:.2f} | {other / one:.1f}"
                for one, other in zip(found, quartiles["chunked torch"], strict=True)
            ]
            print(f"| {form} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
