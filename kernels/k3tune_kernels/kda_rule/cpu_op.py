"""The gated delta rule and its gradients on the native CPU kernels, fp32."""

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from k3tune_kernels.cpu import library


def kda_rule_cpu(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHK: torch.Tensor,
    log_decay_BTHK: torch.Tensor,
    beta_BTH: torch.Tensor,
    bounds: torch.Tensor,
    state_BHKK: torch.Tensor | None,
    *,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`k3tune_kernels.kda_rule.kda_rule` of fp32 tensors, keys as wide as values.

    Args:
        isa: name of an instruction set of :func:`k3tune_kernels.cpu.library.isas`; ``None`` is the
            best one.
    """
    operands = (q_BTHK, k_BTHK, v_BTHK, log_decay_BTHK, beta_BTH, state_BHKK)
    if torch.is_grad_enabled():
        return _KdaRule.apply(*operands, bounds, isa)
    return _forward(*operands, bounds, isa, error_BTHK=None)


class _KdaRule(torch.autograd.Function):
    """Saves ``v - S^T k`` of each token in place of ``v``: it takes no product to have S again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, log_decay, beta, state, bounds, ctx.isa = arguments
        error_BTHK = torch.empty_like(v, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, error_BTHK, log_decay, beta, state, bounds)
        ctx.set_materialize_grads(False)
        return _forward(*arguments, error_BTHK=error_BTHK)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: torch.Tensor | None, d_end: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        gradients = _backward(*ctx.saved_tensors, isa=ctx.isa, d_out=d_out, d_end=d_end)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return (*(gradient if needs else None for gradient, needs in needed), None, None)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    bounds: torch.Tensor,
    isa: str | None,
    *,
    error_BTHK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last states; the errors are written where there is a place for them."""
    batch, _, heads, dim = q.shape
    out_BTHK, end_BHKK = q.new_empty(q.shape), q.new_empty(batch, heads, dim, dim)
    _run(
        q.shape,
        bounds,
        isa,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        begin=state,
        out=out_BTHK,
        error=error_BTHK,
        end=end_BHKK,
    )
    return out_BTHK, end_BHKK


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    error: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    bounds: torch.Tensor,
    *,
    isa: str | None,
    d_out: torch.Tensor | None,
    d_end: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, the log-decay, beta and the first state (None where there was none)."""
    dq, dk, dv, d_log_decay = (q.new_empty(q.shape) for _ in range(4))
    d_beta = beta.new_empty(beta.shape)
    d_begin = None if state is None else state.new_empty(state.shape)
    _run(
        q.shape,
        bounds,
        isa,
        q=q,
        k=k,
        log_decay=log_decay,
        beta=beta,
        begin=state,
        error=error,
        d_out=q.new_zeros(q.shape) if d_out is None else d_out,
        d_end=d_end,
        dq=dq,
        dk=dk,
        dv=dv,
        d_log_decay=d_log_decay,
        d_beta=d_beta,
        d_begin=d_begin,
    )
    return dq, dk, dv, d_log_decay, d_beta, d_begin


def _run(
    shape: torch.Size, bounds: torch.Tensor, isa: str | None, **operands: torch.Tensor | None
) -> None:
    """One call with operands by the names of its fields; made contiguous where they are not."""
    call = library.KdaRule()
    _, call.row_tokens, call.heads, call.head_dim = shape
    call.threads, call.isa = torch.get_num_threads(), library.isa_index(isa)
    held = {name: operand.contiguous() for name, operand in operands.items() if operand is not None}
    assert all(operand.dtype is torch.float32 for operand in held.values()), "not fp32"
    held["bounds"] = bounds.contiguous()
    call.documents = len(bounds) - 1
    for name, operand in held.items():
        setattr(call, name, operand.data_ptr())
    library.check(library.load().k3_kda_rule(ctypes.addressof(call)))
