"""Which experts two sides chose for the same tokens.

Shape letters: ``S`` samples, ``T`` tokens, ``L`` MoE layers, ``A`` active experts a token, ``N``
counted tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tune.monitor.samples import Bools, Samples

Experts = NDArray[np.int16]


def shared_experts(train_STLA: Experts, rollout_STLA: Experts) -> NDArray[np.int64]:
    """How many experts both sides chose, ``[S, T, L]``; sets are compared, not orders."""
    active = train_STLA.shape[-1]
    found = np.full(train_STLA.shape[:-1], active, dtype=np.int64)
    # nearly all entries are equal in the same order: only the others are looked at expert by expert
    unequal = (train_STLA != rollout_STLA).any(axis=-1)
    train_NA, rollout_NA = train_STLA[unequal], rollout_STLA[unequal]
    counts = np.zeros(len(train_NA), dtype=np.int64)
    for place in range(active):
        counts += (rollout_NA == train_NA[:, place : place + 1]).any(axis=-1)
    found[unequal] = counts
    return found


def tokens_routed_apart(samples: Samples) -> Bools | None:
    """``[S, T]``: true where the expert set of at least one layer differs; None if not known."""
    if samples.train_experts is None or samples.rollout_experts is None:
        return None
    shared = shared_experts(samples.train_experts, samples.rollout_experts)
    return (shared < samples.train_experts.shape[-1]).any(axis=-1) & samples.mask


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
