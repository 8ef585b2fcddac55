"""``k3tune placement``: from measured router counts, which rank shall hold which experts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3tune.commands.flags import Json

if TYPE_CHECKING:
    from k3tune.parallel.router_counts import RouterCounts
    from k3tune.parallel.shards import ExpertShards

_SHOWN_LAYERS = 5


def placement(
    counts: Annotated[
        Path, typer.Argument(metavar="COUNTS", help="Router counts that a run measured.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="expert_parallel_size of the run to come.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, for expert_placement of that run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Spread the experts so that no rank waits long for another.

    Prints how busy ranks are with experts in a row and as placed, and the hottest experts. Adapters
    and the model's answers do not depend on the placement.
    """
    from k3tune.files import refuse_same_file
    from k3tune.parallel.placement import place_experts, write_placement
    from k3tune.parallel.router_counts import RouterCounts

    if out is not None:
        refuse_same_file(counts, out)
    measured = RouterCounts.read(counts)
    placed = place_experts(measured, ranks)
    if out is not None:
        write_placement(out, placed)
    forms = {"contiguous": measured.contiguous(ranks), "placed": placed}
    if as_json:
        least = measured.least_imbalance(ranks)
        facts = {"ranks": ranks, "least_imbalance": least, **_json(measured, forms)}
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo("\n".join(_lines(measured, forms)))
    if out is not None:
        typer.echo(f"written: {out}")


def _json(counts: "RouterCounts", forms: "dict[str, ExpertShards]") -> dict[str, Any]:
    """By form: the imbalance, and by layer its imbalance, busiest rank and hottest experts."""
    return {
        name: {
            "imbalance": counts.imbalance(shards),
            "layers": {
                str(load.layer): {
                    "imbalance": load.imbalance,
                    "busiest_rank": load.busiest_rank,
                    "hottest": [list(pair) for pair in load.hottest],
                }
                for load in counts.loads(shards)
            },
        }
        for name, shards in forms.items()
    }


def _lines(counts: "RouterCounts", forms: "dict[str, ExpertShards]") -> Iterator[str]:
    ranks = next(iter(forms.values())).num_ranks
    yield f"{len(counts.layers)} layers of {counts.num_experts} experts over {ranks} ranks"
    for name, shards in forms.items():
        factor = counts.imbalance(shards)
        yield (
            f"{name:10}  busiest rank over mean {factor:.3f}: {1 - 1 / factor:.1%} of the experts' "
            "time is waiting"
        )
    yield f"{'at best':10}  busiest rank over mean {counts.least_imbalance(ranks):.3f}"
    rows = list(zip(*(counts.loads(shards) for shards in forms.values()), strict=True))
    rows.sort(key=lambda row: -row[0].imbalance)
    yield f"\nlayer  {'  '.join(f'{name:>10}' for name in forms)}  hottest experts (share of rows)"
    for row in rows[:_SHOWN_LAYERS]:
        hottest = ", ".join(f"{expert} ({share:.1%})" for expert, share in row[0].hottest)
        yield f"{row[0].layer:5}  {'  '.join(f'{load.imbalance:10.3f}' for load in row)}  {hottest}"
    if len(rows) > _SHOWN_LAYERS:
        yield f"the {_SHOWN_LAYERS} least even of {len(rows)} layers; --json has all"
