"""The gated delta rule of Kimi Delta Attention over rows of whole documents."""

import torch

from k3tune_kernels import dispatch
from k3tune_kernels.kda_rule import reference
from k3tune_kernels.kda_rule.chunked import kda_chunked

__all__ = ["kda_rule"]

# what the native kernels take a head's width to be a multiple of
_WIDTH_STEP = 16


def kda_rule(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    log_decay_BTHK: torch.Tensor,
    beta_BTH: torch.Tensor,
    bounds: torch.Tensor | None = None,
    state_BHKV: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens and the state each row ends with.

    The state ``S`` of a head starts at zero with each document; then for each token, with
    ``alpha = exp(log_decay)``::

        S <- diag(alpha) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

    Differentiable in everything but the bounds.

    Args:
        q_BTHK, k_BTHK, v_BTHV: fp32 or fp64: queries (already scaled), keys, values.
        log_decay_BTHK: log of the decay, at most 0.
        beta_BTH: writing strength, in (0, 1).
        bounds: int64, cumulative lengths of the documents over the flattened ``B * T`` tokens,
            from 0 on, each of a token or more and none in two rows; None when each row is one.
        state_BHKV: what the first document of each row goes on with; None for zero.
        backend: ``auto``, ``cpu`` or ``reference``.

    Returns:
        ``[B, T, H, V]`` outputs, and the state ``[B, H, K, V]`` of each row's last document.

    Raises:
        ValueError: if shapes or dtypes do not fit, the backend cannot run here, or, for CPU
            tensors, the bounds are not those of documents.
    """
    operands = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    _check(operands, state_BHKV)
    batch, length, *widths = q_BTHK.shape
    if not batch * length:
        value = state_BHKV
        if value is None:
            value = v_BTHV.new_zeros(batch, *widths, v_BTHV.shape[-1])
        return torch.zeros_like(v_BTHV), value
    if bounds is None:
        bounds = torch.arange(0, (batch + 1) * length, length, device=q_BTHK.device)
    elif bounds.device.type == "cpu":
        _check_bounds(bounds, batch, length)
    dim, cpu_limit = q_BTHK.shape[-1], None
    if dim % _WIDTH_STEP or v_BTHV.shape[-1] != dim:
        cpu_limit = f"its CPU kernel takes keys and values of one multiple of {_WIDTH_STEP} values"
    if dispatch.choose("kda_rule", backend, *operands, bounds, cpu_limit=cpu_limit) == "cpu":
        from k3tune_kernels.kda_rule.cpu_op import kda_rule_cpu

        return kda_rule_cpu(*operands, bounds, state_BHKV)
    rule = reference.kda_rule if length == 1 else kda_chunked
    return rule(*operands, bounds, state_BHKV)


def _check(operands: tuple[torch.Tensor, ...], state_BHKV: torch.Tensor | None) -> None:
    keys, values = operands[0].shape, operands[2].shape
    if len(keys) != 4 or operands[0].dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"kda_rule expects q [B, T, H, K] in fp32 or fp64, got {tuple(keys)} "
            f"{operands[0].dtype}"
        )
    expected = [keys, keys, keys[:-1] + values[-1:], keys, keys[:-1]]
    if state_BHKV is not None:
        operands = (*operands, state_BHKV)
        expected.append(keys[:1] + keys[2:] + values[-1:])
    if [x.shape for x in operands] != expected or len({x.dtype for x in operands}) > 1:
        raise ValueError(
            f"kda_rule expects q, k, v, log_decay, beta and a state of shapes "
            f"{', '.join(str(tuple(shape)) for shape in expected)} and one dtype, got "
            f"{', '.join(f'{tuple(x.shape)} {x.dtype}' for x in operands)}"
        )


def _check_bounds(bounds: torch.Tensor, batch: int, length: int) -> None:
    fits = bounds.dtype is torch.int64 and bounds.ndim == 1 and len(bounds) > batch
    fits = fits and bounds[0].item() == 0 and bounds[-1].item() == batch * length
    if fits:
        starts, ends = bounds[:-1], bounds[1:]
        # a document's first and last token are in one row
        fits = bool((starts < ends).all()) and torch.equal(starts // length, (ends - 1) // length)
    if not fits:
        raise ValueError(
            f"kda_rule expects bounds (int64) of documents that fill {batch} rows of {length} "
            f"tokens each, got {bounds.tolist()} ({bounds.dtype})"
        )
