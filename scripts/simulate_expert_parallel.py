"""Expert parallelism at real sizes without weights: what each rank holds and sends.

    python scripts/simulate_expert_parallel.py --ranks 16 32 64

Rows are routed at random, as skewed as asked, and counted rank by rank with the run's own shard
arithmetic (``k3tune.parallel.shards``, ``trunk_bytes``, ``placement``); memory is the planner's.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3tune.errors import K3TuneError
from k3tune.parallel.placement import place_experts
from k3tune.parallel.router_counts import RouterCounts
from k3tune.parallel.shards import ExpertShards, LayerTraffic, layer_traffic, shard_bytes
from k3tune.plan import plan
from k3tune.plan.layout import Layout
from k3tune.plan.planning import Plan, Wishes
from k3tune.plan.render import memory_lines, readable
from k3tune.published.architecture import Architecture


@dataclass(frozen=True)
class Simulation:
    """One number of ranks, one MoE layer, one micro-batch on every rank.

    Attributes:
        plan: of so many ranks.
        sent: what each rank hands to the exchanges, in the order of the ranks.
        unique: the same where a token crosses once to each rank.
        rows: rows that each rank's experts work on, contiguous and as placed.
    """

    plan: Plan
    sent: list[LayerTraffic]
    unique: list[LayerTraffic]
    rows: dict[str, NDArray[np.int64]]


def choose_experts(
    architecture: Architecture, tokens: int, skew: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Distinct experts of each token, drawn by Zipf popularity; int64 ``[tokens, active]``."""
    popularity = 1 / np.arange(1, architecture.num_experts + 1) ** skew
    # hot experts lie anywhere; the same in each call of one generator's seed
    order = np.random.default_rng(0).permutation(architecture.num_experts)
    noise = generator.gumbel(size=(tokens, architecture.num_experts)).astype(np.float32)
    scores = noise + np.log(popularity[order]).astype(np.float32)
    active = architecture.num_experts_per_token
    return np.argpartition(-scores, active - 1, axis=1)[:, :active]


def simulate(ranks: int, *, gpu: str, tokens: int, skew: float, seed: int = 0) -> Simulation:
    """Route ``tokens`` on each of ``ranks`` ranks and count.

    Raises:
        ConfigError: if the base's experts cannot be spread over so many ranks.
    """
    wishes = Wishes(expert_parallel_size=ranks, sequence_length=tokens)
    planned = plan(gpu=gpu, gpus=ranks, wishes=wishes)
    a = planned.architecture
    shards, generator = ExpertShards(a.num_experts, ranks), np.random.default_rng(seed)
    holder_E = np.array(shards.ranks(a.first_k_dense_replace))
    counts_E = np.zeros(a.num_experts, dtype=np.int64)
    sent, unique = [], []
    for _ in range(ranks):
        chosen = choose_experts(a, tokens, skew, generator)
        counts_E += np.bincount(chosen.ravel(), minlength=a.num_experts)
        pairs = np.unique(np.arange(tokens)[:, None] * ranks + holder_E[chosen]).size
        sent.append(_traffic(planned, shards, chosen.size, None))
        unique.append(_traffic(planned, shards, chosen.size, pairs))
    layer = a.first_k_dense_replace
    measured = RouterCounts(a.num_experts, {layer: counts_E})
    forms = {"contiguous": shards, "placed": place_experts(measured, ranks)}
    rows = {name: measured.rank_loads(form, layer) for name, form in forms.items()}
    return Simulation(planned, sent, unique, rows)


def _traffic(
    planned: Plan, shards: ExpertShards, rows: int, unique_rows: int | None
) -> LayerTraffic:
    return layer_traffic(
        shards,
        latent=planned.architecture.routed_expert_hidden_size,
        value_bytes=planned.layout.width,
        rows=rows,
        unique_rows=unique_rows,
    )


def describe(simulation: Simulation) -> Iterator[str]:
    """The simulation for people."""
    planned = simulation.plan
    a, layout = planned.architecture, planned.layout
    shards = ExpertShards(a.num_experts, layout.expert_parallel_size)
    yield (
        f"# {shards.num_ranks} x {planned.hardware.name}: "
        f"{' or '.join(map(str, sorted(set(shards.sizes))))} experts a rank and layer, "
        f"{layout.tokens:,} tokens a rank"
    )
    held = {shard_bytes(a, shards, rank) for rank in range(shards.num_ranks)}
    assert max(held) == planned.bytes_per_rank["packed_experts"], f"{held=}"
    yield from memory_lines(planned.bytes_per_rank)
    yield "fits" if planned.fits else f"does not fit in {readable(planned.hardware.memory_bytes)}"
    layers = len(a.moe_layers)
    for name, ranks in (("each expert", simulation.sent), ("each rank", simulation.unique)):
        step = [_step(traffic, layout) * layers for traffic in ranks]
        messages = _messages(ranks[0], shards, layout) * layers
        yield (
            f"a row once to {name:11}: {readable(min(step))} to {readable(max(step))} sent by a "
            f"rank in a step, {messages:,} messages"
        )
    for name, rows_R in simulation.rows.items():
        yield (
            f"rows of a rank, {name:10}: {rows_R.min():,} to {rows_R.max():,}, busiest over mean "
            f"{rows_R.max() / rows_R.mean():.3f}"
        )


def _step(traffic: LayerTraffic, layout: Layout) -> int:
    return traffic.total + (traffic.forward if layout.activation_checkpointing else 0)


def _messages(traffic: LayerTraffic, shards: ExpertShards, layout: Layout) -> int:
    # two of a layer's exchanges are the backward's; the others go again when it is recomputed
    exchanges = traffic.messages // max(shards.num_ranks - 1, 1)
    again = exchanges - 2 if layout.activation_checkpointing else 0
    return (exchanges + again) * (shards.num_ranks - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--gpu", default="h200", help="a device that k3tune plan knows")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a rank")
    parser.add_argument("--skew", type=float, default=0.5, help="exponent of the popularity")
    options = parser.parse_args(arguments)
    try:
        for ranks in options.ranks:
            simulation = simulate(ranks, gpu=options.gpu, tokens=options.tokens, skew=options.skew)
            print("\n".join(describe(simulation)), end="\n\n")
    except K3TuneError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
