"""The attention-residual mixer in plain torch: the mix and its gradients.

Letters: S sources, D channels; ``...`` are the token dimensions.

With ``q_c = norm_c * query_c``, ``r_i = rsqrt(mean_c(s_ic^2) + eps)``, ``p_i = sum_c q_c s_ic``::

    score_i = r_i p_i,   a = softmax_i(score),   out_c = sum_i a_i s_ic

and for a gradient g of the output::

    dscore_i = a_i (g.s_i - sum_j a_j g.s_j)
    ds_ic    = a_i g_c + dscore_i r_i (q_c - r_i^2 p_i s_ic / D)
    dq_c     = sum_tokens sum_i dscore_i r_i s_ic,   dnorm = dq * query,   dquery = dq * norm

The sources are visited one at a time, so no buffer of S * D values a token is ever made.
"""

from collections.abc import Sequence

import torch


def forward(
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mix, and what the backward pass needs.

    Args:
        sources: S tensors ``[..., D]`` of one shape and dtype.
        norm_weight_D, query_weight_D: ``[D]`` each.
        eps: added to the mean square.

    Returns:
        ``[..., D]`` in the sources' dtype; the mixing weights and the inverse root mean
        squares, ``[..., S]`` each, in fp32 (fp64 for fp64 sources).
    """
    compute = torch.promote_types(sources[0].dtype, torch.float32)
    q_D = norm_weight_D.to(compute) * query_weight_D.to(compute)
    scores, inverse_rms = [], []
    for source in sources:
        s = source.to(compute)
        inverse_rms.append(torch.rsqrt(s.square().mean(-1) + eps))
        scores.append((s * q_D).sum(-1) * inverse_rms[-1])
    weights_S = torch.softmax(torch.stack(scores, -1), -1)
    mix = torch.zeros(sources[0].shape, dtype=compute, device=sources[0].device)
    for i, source in enumerate(sources):
        mix.addcmul_(weights_S[..., i : i + 1], source.to(compute))
    return mix.to(sources[0].dtype), weights_S, torch.stack(inverse_rms, -1)


def backward(
    grad: torch.Tensor,
    sources: Sequence[torch.Tensor],
    norm_weight_D: torch.Tensor,
    query_weight_D: torch.Tensor,
    weights_S: torch.Tensor,
    inverse_rms_S: torch.Tensor,
    *,
    sum_weights: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Gradients for every source and for ``norm * query``.

    Args:
        grad: gradient of the mix, ``[..., D]``.
        sources, norm_weight_D, query_weight_D: as given to :func:`forward`.
        weights_S, inverse_rms_S: as returned by :func:`forward`.
        sum_weights: whether the gradient of the product of the two weights is wanted.

    Returns:
        S tensors like the sources, and dq ``[D]`` in fp32 (fp64 for fp64 sources) or ``None``.
    """
    compute = weights_S.dtype
    q_D, g = norm_weight_D.to(compute) * query_weight_D.to(compute), grad.to(compute)
    d_weights_S = torch.stack([(g * source.to(compute)).sum(-1) for source in sources], -1)
    d_scores_S = weights_S * (d_weights_S - (weights_S * d_weights_S).sum(-1, keepdim=True))
    d_q_D = torch.zeros_like(q_D) if sum_weights else None
    d_sources = []
    for i, source in enumerate(sources):
        s = source.to(compute)
        weight, r = weights_S[..., i : i + 1], inverse_rms_S[..., i : i + 1]
        through_norm = d_scores_S[..., i : i + 1] * r
        if d_q_D is not None:
            d_q_D += (through_norm * s).reshape(-1, s.shape[-1]).sum(0)
        projection = (s * q_D).sum(-1, keepdim=True)
        curvature = r.square() * projection / s.shape[-1]
        d_sources.append((weight * g + through_norm * (q_D - curvature * s)).to(source.dtype))
    return d_sources, d_q_D
