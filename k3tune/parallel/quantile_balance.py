"""The router biases that would have balanced measured tokens: a diagnostic, the router is frozen.

Quantile Balancing (tech report, section 2.3.3) sets a layer's biases so that each expert is chosen
equally often. Far from the stored ones, the tokens differ from those the router was balanced on.

Shape letters: ``N`` tokens, ``E`` experts, ``A`` active experts a token.
"""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating]


def quantile_biases(scores_NE: Scores, biases_E: Scores, num_active: int) -> Scores:
    """One step of Quantile Balancing.

    Each token's cut is its (A + 1)-th biased score; an expert's new bias is what lifts its score
    above the cut for the share ``A / E`` of the tokens. Biases are centred on their mean.

    Args:
        scores_NE: unbiased router scores of one layer, ``[N, E]``.
        biases_E: ``e_score_correction_bias``, ``[E]``.
        num_active: experts a token, below E.

    Returns:
        The biases, float64 ``[E]``.
    """
    scores_NE = np.asarray(scores_NE, dtype=np.float64)
    experts = scores_NE.shape[1]
    assert 0 < num_active < experts, f"{num_active=} {experts=}"
    biased_NE = scores_NE + biases_E
    cut = experts - num_active - 1
    cut_N = np.partition(biased_NE, cut, axis=1)[:, cut]
    margin_NE = scores_NE - cut_N[:, None]
    new_E = -np.quantile(margin_NE, 1 - num_active / experts, axis=0)
    return np.asarray(new_E - new_E.mean())


def chosen_counts(scores_NE: Scores, biases_E: Scores, num_active: int) -> NDArray[np.int64]:
    """Tokens that choose each expert under these biases, int64 ``[E]``."""
    biased_NE = np.asarray(scores_NE, dtype=np.float64) + biases_E
    chosen_NA = np.argpartition(-biased_NE, num_active - 1, axis=1)[:, :num_active]
    return np.bincount(chosen_NA.ravel(), minlength=biased_NE.shape[1]).astype(np.int64)
