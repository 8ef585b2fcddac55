"""The least time a step can take: peaks of the device, no kernel's losses, no waiting.

A part's time is the longer of its arithmetic at the dense BF16 peak and its weights' reading at the
memory's bandwidth. Experts and dispatch wait for the busiest rank. Gathering of a sharded trunk
overlaps with all of that, averaging of gradients with none of it. Left out: KDA's state, norms,
the optimizer.
"""

from dataclasses import asdict, dataclass
from typing import Any

from k3tune.parallel.shards import expert_bytes
from k3tune.plan.adapter import RankFactors
from k3tune.plan.hardware import Hardware
from k3tune.plan.layout import Layout
from k3tune.plan.sizes import BaseBytes
from k3tune.plan.traffic import StepTraffic, distinct_experts
from k3tune.published.architecture import Architecture

# Two FLOPs a multiply-add.
_MULTIPLY_ADD = 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one micro-batch a rank.

    Attributes:
        experts_s: routed experts, on the busiest rank.
        trunk_s: everything else that multiplies.
        dispatch_s: rows to other ranks and back, on the busiest rank.
        gather_s: of the sharded trunk.
        gradients_s: averaging.
        step_s: together, what overlaps counted once.
        tokens_per_s: of all ranks.
        imbalance: rows of the busiest rank over the mean.
        lost_s: of ``step_s``, what the imbalance costs.
    """

    experts_s: float
    trunk_s: float
    dispatch_s: float
    gather_s: float
    gradients_s: float
    step_s: float
    tokens_per_s: float
    imbalance: float
    lost_s: float

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def step_time(
    architecture: Architecture,
    base: BaseBytes,
    active: int,
    factors: RankFactors,
    traffic: StepTraffic,
    layout: Layout,
    hardware: Hardware,
    imbalance: float = 1.0,
) -> StepTime:
    """Roofline of a step.

    Args:
        architecture, base: of the base.
        active: parameters a token is multiplied with.
        factors: numbers of a rank's factors.
        traffic: of a rank's step.
        layout, hardware: of the run.
        imbalance: rows of the busiest rank over the mean, at least 1.
    """
    a = architecture
    routed = _routed_per_token(a)
    # forward, gradient of the input, and the forward again; the experts' op also makes gate and up
    # anew in its backward
    passes = 3 if layout.activation_checkpointing else 2
    experts_flops = _MULTIPLY_ADD * routed * (passes + 2 / 3)
    trunk_flops = _MULTIPLY_ADD * passes * (active - routed) + _attention_flops(a, layout, passes)
    # factors: of a token's own experts, three products each
    share = a.num_experts_per_token / (a.num_experts / layout.expert_parallel_size)
    trunk_flops += 3 * _MULTIPLY_ADD * (factors.replicated + factors.experts * share)
    reached = distinct_experts(a, layout.tokens * layout.expert_parallel_size)
    experts_bytes = len(a.moe_layers) * reached * expert_bytes(a) / layout.expert_parallel_size
    experts = max(
        layout.tokens * experts_flops / hardware.flops_per_s,
        passes * experts_bytes / hardware.bandwidth_bytes_per_s,
    )
    trunk = max(
        layout.tokens * trunk_flops / hardware.flops_per_s,
        passes * (base.trunk - base.embedding) / hardware.bandwidth_bytes_per_s,
    )
    dispatch = _exchange_s(traffic.dispatch, layout.expert_parallel_size, hardware)
    gather = traffic.trunk / hardware.link(layout.trunk_ranks)
    gradients = traffic.gradients / hardware.link(layout.gpus)

    def together(factor: float) -> float:
        return max(trunk + factor * (experts + dispatch), gather) + gradients

    step = together(imbalance)
    return StepTime(
        experts_s=imbalance * experts,
        trunk_s=trunk,
        dispatch_s=imbalance * dispatch,
        gather_s=gather,
        gradients_s=gradients,
        step_s=step,
        tokens_per_s=layout.gpus * layout.tokens / step,
        imbalance=imbalance,
        lost_s=step - together(1.0),
    )


def _routed_per_token(a: Architecture) -> int:
    one = 3 * a.routed_expert_hidden_size * a.moe_intermediate_size
    return len(a.moe_layers) * a.num_experts_per_token * one


def _attention_flops(a: Architecture, layout: Layout, passes: int) -> float:
    """Scores and values of MLA a token; a token sees half of its row on average."""
    width = a.num_attention_heads * (a.qk_head_dim + a.v_head_dim)
    # the backward has two products for each of the forward's
    products = (passes - 1) + 2
    return _MULTIPLY_ADD * products * len(a.mla_layers) * width * layout.sequence_length / 2


def _exchange_s(sent: float, ranks: int, hardware: Hardware) -> float:
    """An all-to-all's time: what leaves the fast domain goes over the network at the same time."""
    if ranks == 1:
        return 0.0
    inside = min(ranks, hardware.link_ranks)
    near = sent * (inside - 1) / ranks / hardware.link_bytes_per_s
    far = sent * (ranks - inside) / ranks / hardware.network_bytes_per_s
    return max(near, far)
