"""A plan as the JSON object of ``k3tune plan --json``."""

from dataclasses import asdict
from typing import Any

from k3tune.plan.planning import Plan
from k3tune.plan.traffic import conventional_dispatch_values, dispatch_values


def plan_json(plan: Plan) -> dict[str, Any]:
    """The figures of ``k3tune plan --json``.

    Returns:
        ``parameters`` (by part, ``total``, ``active``), ``dispatch_values_per_token`` and
        ``conventional_dispatch_values_per_token``, ``bytes_per_rank`` (by part, ``total``),
        ``bf16_trainer_bytes_per_rank``, ``fits``, ``smallest_fit`` (null: no count tried holds
        it), ``decode`` (of a MoE layer: ``batch``, ``distinct_experts``, ``expert_bytes``,
        ``trunk_bytes``); and beside these ``activation_bytes_per_rank``,
        ``bf16_trainer_smallest_fit``, ``decode_model``, ``adapter``, ``step``, ``traffic``,
        ``hardware`` and ``layout``.
    """
    hardware = asdict(plan.hardware)
    return {
        "parameters": plan.parameters,
        "dispatch_values_per_token": dispatch_values(plan.architecture),
        "conventional_dispatch_values_per_token": conventional_dispatch_values(plan.architecture),
        "bytes_per_rank": plan.bytes_per_rank,
        "bf16_trainer_bytes_per_rank": plan.bf16_trainer_bytes_per_rank,
        "fits": plan.fits,
        "smallest_fit": plan.smallest_fit,
        "decode": [asdict(read) for read in plan.decode],
        "activation_bytes_per_rank": {
            "with_checkpointing": plan.activations.checkpointed,
            "without_checkpointing": plan.activations.all_layers,
        },
        "bf16_trainer_smallest_fit": plan.bf16_smallest_fit,
        "decode_model": [asdict(read) for read in plan.reads],
        "adapter": {"parameters": plan.adapter.total, "by_group": plan.adapter.by_group},
        "step": plan.step.to_json(),
        "traffic": asdict(plan.traffic),
        "hardware": hardware,
        "layout": asdict(plan.layout),
    }
