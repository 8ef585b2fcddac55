"""Every number that says how far trainer and engine are apart, from one step's samples.

Names and meanings are those of :mod:`k3tune.monitor.record`. Tokens whose log-probability is not
finite on either side are counted and left out; nothing is replaced by 0. All sums are fp64.

Shape letters: ``S`` samples, ``T`` tokens of the longest completion, ``N`` counted tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tune.monitor.record import IS_BOUNDS
from k3tune.monitor.samples import Bools, Floats, Samples

CLAMP = 10.0
"""Bound of a token's k3."""

_CLAMP_SEQUENCE = 20.0
# below it e^r - 1 - r loses digits to cancellation, and two terms of its series are exact enough
_SMALL = 1e-3
# e^350 can be squared in fp64
_LARGEST_EXPONENT = 350.0


def k3_of(r: Floats) -> Floats:
    """Schulman's k3 of each log ratio, ``e^r - 1 - r``, at least 0 and cut at :data:`CLAMP`."""
    small = r * r * (0.5 + r * (1 / 6 + r / 24))
    exact = np.expm1(np.minimum(r, _LARGEST_EXPONENT)) - r
    return np.minimum(np.where(np.abs(r) < _SMALL, small, exact), CLAMP)


def ratio_of(r: Floats) -> Floats:
    """w of each log ratio, finite however large r is."""
    return np.exp(np.minimum(r, _LARGEST_EXPONENT))


def mismatch(samples: Samples) -> dict[str, Any]:
    """All estimators of the record ``mismatch`` that need nothing but the two log-probabilities.

    Args:
        samples: one step's.

    Returns:
        Name -> number; None for all but the counts if no token counts.
    """
    good = samples.finite
    r_ST = samples.log_ratio
    r_N = r_ST[good]
    rows = good.any(axis=1)
    counts = {
        "num_samples": int(rows.sum()),
        "num_tokens": int(good.sum()),
        "nan_count": int(samples.mask.sum() - good.sum()),
        "clamp_count": int((np.expm1(np.minimum(r_N, _LARGEST_EXPONENT)) - r_N > CLAMP).sum()),
    }
    values = {
        **_divergences(r_ST, good),
        **_differences(r_N),
        **_token_ratios(r_N),
        **_sequence_ratios(r_ST, good),
        **_perplexities(samples, good),
        **_entropy(samples, good),
        **_correction(samples),
    }
    return {**counts, **values}


def sample_means(values_ST: Floats, good: Bools) -> Floats:
    """Mean over each sample's counted tokens, of the samples that have one."""
    rows = good.any(axis=1)
    sums = np.where(good, values_ST, 0.0).sum(axis=1)
    return sums[rows] / good.sum(axis=1)[rows]


def _divergences(r_ST: Floats, good: Bools) -> dict[str, float | None]:
    k3_ST, k2_ST = k3_of(r_ST), 0.5 * r_ST**2
    r_N = r_ST[good]
    return {
        "k3": _mean(sample_means(k3_ST, good)),
        "k3_token_mean": _mean(k3_ST[good]),
        "k1": _mean(-sample_means(r_ST, good)),
        "k1_token_mean": _mean(-r_N),
        "k2": _mean(sample_means(k2_ST, good)),
        "k2_token_mean": _mean(k2_ST[good]),
        "k3_reverse": _mean(sample_means(k3_of(-r_ST), good)),
        "js": _mean(sample_means(_js_of(r_ST), good)),
    }


def _js_of(r: Floats) -> Floats:
    """``(w ln w - (1 + w) ln((1 + w) / 2)) / 2``, whose mean over rollouts is Jensen-Shannon."""
    r = np.clip(r, -_CLAMP_SEQUENCE, _CLAMP_SEQUENCE)
    w = np.exp(r)
    exact = 0.5 * (w * r - (1 + w) * np.log1p(np.expm1(r) / 2))
    return np.where(np.abs(r) < _SMALL, r * r / 8, exact)


def _differences(r_N: Floats) -> dict[str, float | None]:
    size_N = np.abs(r_N)
    return {
        "abs_mean": _mean(size_N),
        "abs_std": float(size_N.std()) if size_N.size else None,
        "abs_median": float(np.median(size_N)) if size_N.size else None,
        "abs_p95": float(np.quantile(size_N, 0.95)) if size_N.size else None,
        "abs_max": float(size_N.max()) if size_N.size else None,
        "mult_prob_error": _mean(ratio_of(size_N)),
    }


def _token_ratios(r_N: Floats) -> dict[str, float | None]:
    w_N = ratio_of(r_N)
    outside = (w_N < IS_BOUNDS[0]) | (w_N > IS_BOUNDS[1])
    return {
        "is_mean": _mean(w_N),
        "is_std": float(w_N.std()) if w_N.size else None,
        "is_min": float(w_N.min()) if w_N.size else None,
        "is_max": float(w_N.max()) if w_N.size else None,
        "is_out_of_bounds": _mean(outside.astype(np.float64)),
        "ess": _effective_share(w_N),
        # E[w^2] - 1, summed so that small values keep their digits
        "chi2": _mean(np.expm1(2 * np.minimum(r_N, _LARGEST_EXPONENT))),
    }


def _sequence_ratios(r_ST: Floats, good: Bools) -> dict[str, float | int | None]:
    rows = good.any(axis=1)
    sums_S = np.where(good, r_ST, 0.0).sum(axis=1)[rows]
    cut_S = np.clip(sums_S, -_CLAMP_SEQUENCE, _CLAMP_SEQUENCE)
    sequence_S, geometric_S = np.exp(cut_S), ratio_of(sample_means(r_ST, good))
    values: dict[str, float | int | None] = {
        "clamp_count_sequence": int((cut_S != sums_S).sum()),
        "ess_sequence": _effective_share(sequence_S),
        "chi2_sequence": _mean(np.expm1(2 * cut_S)),
    }
    for name, w_S in (("is_sequence", sequence_S), ("is_geometric", geometric_S)):
        values[f"{name}_mean"] = _mean(w_S)
        values[f"{name}_min"] = float(w_S.min()) if w_S.size else None
        values[f"{name}_max"] = float(w_S.max()) if w_S.size else None
    return values


def _perplexities(samples: Samples, good: Bools) -> dict[str, float | None]:
    train, rollout = _mean(samples.train[good]), _mean(samples.rollout[good])
    if train is None or rollout is None:
        return dict.fromkeys(
            ("ppl_train", "ppl_rollout", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff")
        )
    differences_S = -sample_means(samples.log_ratio, good)
    return {
        "ppl_train": float(np.exp(-train)),
        "ppl_rollout": float(np.exp(-rollout)),
        "ppl_ratio": float(np.exp(rollout - train)),
        "log_ppl_diff": _mean(differences_S),
        "log_ppl_abs_diff": _mean(np.abs(differences_S)),
    }


def _entropy(samples: Samples, good: Bools) -> dict[str, float | None]:
    if samples.entropy is None:
        return {"entropy": None, "kl_entropy_ratio": None}
    entropy = _mean(samples.entropy[good])
    k3 = _mean(k3_of(samples.log_ratio)[good])
    # a policy without entropy has no ratio
    ratio = k3 / entropy if k3 is not None and entropy else None
    return {"entropy": entropy, "kl_entropy_ratio": ratio}


def _correction(samples: Samples) -> dict[str, float | None]:
    if samples.correction is None:
        return {"masked_fraction": None, "truncated_fraction": None}
    weights = samples.correction[samples.mask]
    ratios = ratio_of(samples.log_ratio)[samples.mask]
    # a truncated weight is below its ratio by more than the rounding of an fp32 product
    cut = (weights != 0) & (weights < ratios * (1 - 1e-4))
    return {"masked_fraction": _mean((weights == 0) * 1.0), "truncated_fraction": _mean(cut * 1.0)}


def _effective_share(w: Floats) -> float | None:
    if not w.size:
        return None
    # relative to the largest, so that squares stay finite
    w = w / w.max()
    return float(w.sum() ** 2 / (w.size * (w * w).sum()))


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
