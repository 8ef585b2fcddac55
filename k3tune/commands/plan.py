"""``k3tune plan``: will it fit, what will it cost, from the config alone."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from k3tune.commands.flags import Json
from k3tune.errors import ConfigError

_USUAL_GPUS, _MOST_SEARCHED = 16, 1024

Config = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG_DIR",
        help="Folder with config.json, or a hub id; without one: Kimi K3 as published.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="How many; default 16, with --search at most 1024."),
]
Gpu = Annotated[
    Literal[
        "h200",
        "h100",
        "a100",
        "b200",
        "b300",
        "gb300",
        "mi355x",
        "mi350x",
        "mi325x",
        "mi300x",
        "cpu",
    ],
    typer.Option(help="Which device."),
]
GpuMemory = Annotated[
    float | None, typer.Option(help="Its memory in GB (1e9 bytes), if another than listed.")
]
GpuBandwidth = Annotated[
    float | None, typer.Option(help="Its memory's bandwidth in GB/s, if another than listed.")
]
GpusPerNode = Annotated[
    int | None, typer.Option(min=1, help="Devices of a node, if another number than usual.")
]
ExpertParallelSize = Annotated[
    int | None,
    typer.Option(
        "--ep",
        "--expert-parallel-size",
        min=1,
        help="Ranks that share the experts; default: the most that share them evenly.",
    ),
]
ZeroStage = Annotated[
    int | None,
    typer.Option(
        "--zero", "--zero-stage", help="Of DeepSpeed; default 2 on several devices, 0 on one."
    ),
]
TrunkShard = Annotated[
    str | None,
    typer.Option(
        help="Ranks that share what is no expert: none, node, or their number; default node."
    ),
]
SequenceLength = Annotated[int, typer.Option(min=1, help="Tokens of a row.")]
MicroBatch = Annotated[int, typer.Option(min=1, help="Rows of a forward on a rank.")]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Whether a layer's activations are computed again for its backward; default: it is.",
    ),
]
Targets = Annotated[
    str,
    typer.Option(
        help="What LoRA adapts, with commas: attention, latent, experts, shared_experts, dense, "
        "or patterns of a module name's end."
    ),
]
Form = Annotated[
    Literal["per_expert", "shared_outer"],
    typer.Option(help="The experts' factors: each its own, or those on the latent's side shared."),
]
Rank = Annotated[int, typer.Option(min=1, help="LoRA rank.")]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of what is no expert.")]
Imbalance = Annotated[
    str,
    typer.Option(
        metavar="NUMBER|FILE",
        help="Rows of the busiest rank over the mean, or a file of router counts that says it.",
    ),
]
Placement = Annotated[
    Path | None, typer.Option(help="Placement to judge the file of router counts by.")
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Find the cheapest layout that fits: fewest devices, then least time. It "
        "chooses --ep, --trunk-shard and --checkpointing where they are not given.",
    ),
]


def plan(
    config: Config = None,
    gpus: Gpus = None,
    gpu: Gpu = "h200",
    gpu_memory_gb: GpuMemory = None,
    gpu_bandwidth: GpuBandwidth = None,
    gpus_per_node: GpusPerNode = None,
    ep: ExpertParallelSize = None,
    zero: ZeroStage = None,
    trunk_shard: TrunkShard = None,
    sequence_length: SequenceLength = 2048,
    micro_batch: MicroBatch = 1,
    checkpointing: Checkpointing = None,
    targets: Targets = "attention,latent,experts,shared_experts",
    form: Form = "shared_outer",
    rank: Rank = 16,
    dtype: Dtype = "bfloat16",
    imbalance: Imbalance = "1",
    placement: Placement = None,
    search: Search = False,
    as_json: Json = False,
) -> None:
    """Say what LoRA training on Kimi K3 needs.

    Parameters, bytes of a rank by part, traffic, reads of decoding and the least time of a step,
    computed from the config alone. The exit status does not tell whether it fits.
    """
    from k3tune.lora.spec import LoraSpec
    from k3tune.plan import plan as make_plan
    from k3tune.plan.figures import plan_json
    from k3tune.plan.hardware import find_hardware
    from k3tune.plan.planning import Wishes
    from k3tune.plan.render import render_plan

    factor, experts = _imbalance(imbalance, placement, ep)
    found = make_plan(
        config,
        gpu=find_hardware(gpu, memory_gb=gpu_memory_gb, bandwidth_gb_per_s=gpu_bandwidth),
        gpus=gpus or (_MOST_SEARCHED if search else _USUAL_GPUS),
        lora=LoraSpec(tuple(word.strip() for word in targets.split(",")), rank=rank, form=form),
        wishes=Wishes(
            expert_parallel_size=ep,
            trunk_shard=trunk_shard,
            zero_stage=zero,
            gpus_per_node=gpus_per_node,
            sequence_length=sequence_length,
            micro_batch=micro_batch,
            activation_checkpointing=checkpointing,
            dtype=dtype,
        ),
        imbalance=factor,
        search=search,
    )
    if experts not in (None, found.architecture.num_experts):
        raise ConfigError(
            f"--imbalance {imbalance} counts {experts} experts a layer, expected "
            f"{found.architecture.num_experts} as in the config: give counts of the same base"
        )
    typer.echo(json.dumps(plan_json(found), indent=2) if as_json else render_plan(found))


def _imbalance(said: str, placement: Path | None, ranks: int | None) -> tuple[float, int | None]:
    """The number and None, or that of measured counts and the number of experts they count."""
    try:
        number = float(said)
    except ValueError:
        pass
    else:
        if placement is not None:
            raise ConfigError(
                f"--imbalance is {number:g} and --placement is given, expected a file of router "
                "counts to judge the placement by: leave one of them out"
            )
        return number, None
    if ranks is None:
        raise ConfigError(
            f"--imbalance is the file {said}, expected --ep too: counts are summed over the ranks "
            "of an expert-parallel group"
        )
    from k3tune.parallel.placement import read_placement
    from k3tune.parallel.router_counts import RouterCounts

    counts = RouterCounts.read(said)
    shards = counts.contiguous(ranks) if placement is None else read_placement(placement)
    if shards.num_ranks != ranks:
        raise ConfigError(
            f"--placement {placement} is over {shards.num_ranks} ranks and --ep is {ranks}, "
            "expected the same: make a placement with --ranks of that run"
        )
    return counts.imbalance(shards), counts.num_experts
