"""Which experts two sides chose for the same tokens.

Shape letters: ``S`` samples, ``T`` tokens, ``L`` MoE layers, ``A`` active experts a token, ``N``
counted tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tune.monitor.samples import Floats, Samples

Experts = NDArray[np.int16]

FAR_APART = 0.5
"""Numerics swap one of two nearly equal experts: a token with less than this share of its experts
in common was routed otherwise by something else."""


def shared_experts(train_LA: Experts, rollout_LA: Experts) -> NDArray[np.int64]:
    """How many of ``[..., L, A]`` experts both sides chose, ``[..., L]``: as sets, not orders."""
    active = train_LA.shape[-1]
    found = np.full(train_LA.shape[:-1], active, dtype=np.int64)
    # nearly all entries are equal in the same order: only the others are looked at expert by expert
    unequal = (train_LA != rollout_LA).any(axis=-1)
    train_NA, rollout_NA = train_LA[unequal], rollout_LA[unequal]
    counts = np.zeros(len(train_NA), dtype=np.int64)
    for place in range(active):
        counts += (rollout_NA == train_NA[:, place : place + 1]).any(axis=-1)
    found[unequal] = counts
    return found


def token_overlap(samples: Samples) -> Floats | None:
    """``[S, T]``: share of a token's experts, over all layers, that both sides chose.

    1 where the token does not count; None if not known.
    """
    if samples.train_experts is None or samples.rollout_experts is None:
        return None
    layers, active = samples.train_experts.shape[-2:]
    shared = shared_experts(samples.train_experts, samples.rollout_experts).sum(axis=-1)
    return np.where(samples.mask, shared / (layers * active), 1.0)


def smallest_overlap(train_TLA: Experts, rollout_TLA: Experts) -> float:
    """The smallest share of a token's experts, over all layers, that both sides chose."""
    if not train_TLA.size:
        return 1.0
    shared = shared_experts(train_TLA, rollout_TLA).sum(axis=-1)
    layers, active = train_TLA.shape[-2:]
    return float(shared.min() / (layers * active))


def router_mismatch(samples: Samples) -> dict[str, Any]:
    """The fields ``router_*`` of the record ``mismatch``; None without both sides' experts."""
    names = ("", "_tokens", "_layers")
    nothing = dict.fromkeys([f"router_mismatch{name}" for name in names] + ["router_overlap"])
    if samples.train_experts is None or samples.rollout_experts is None or not samples.mask.any():
        return nothing
    train_NLA, rollout_NLA = (
        experts[samples.mask] for experts in (samples.train_experts, samples.rollout_experts)
    )
    active = train_NLA.shape[-1]
    shared_NL = shared_experts(train_NLA, rollout_NLA)
    differs_NL = shared_NL < active
    return {
        "router_mismatch": float(differs_NL.mean()),
        "router_mismatch_tokens": float(differs_NL.any(axis=-1).mean()),
        "router_overlap": float(shared_NL.mean() / active),
        "router_mismatch_layers": [float(share) for share in differs_NL.mean(axis=0)],
    }
