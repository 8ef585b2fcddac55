"""Log-softmax, loss and gradient of a chunk of logits, in place, in one Triton kernel.

The equations are in ``reference.py``; the matmuls around it in ``chunked.py``.
"""

import torch
import triton
import triton.language as tl

BLOCK_V = 8192
# Triton 3.10 turns fp fusion off by default.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _linear_cross_entropy_fwd_kernel(
    logits,
    targets,
    nll,
    vocabulary,
    ignore_index,
    WITH_GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid ``(C,)``: a program takes one token's V logits, BLOCK_V at a time.

    It reads them once for the running maximum and sum and, with ``WITH_GRADIENT``, a second time
    (a row of the published vocabulary still lies in the second-level cache) to overwrite them
    with the gradient of the token's loss.
    """
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    row = logits + token * vocabulary
    column = tl.arange(0, BLOCK_V)
    if target == ignore_index:
        tl.store(nll + token, 0.0)
        if WITH_GRADIENT:
            zeros = tl.zeros((BLOCK_V,), logits.dtype.element_ty)
            for start in range(0, vocabulary, BLOCK_V):
                tl.store(row + start + column, zeros, mask=start + column < vocabulary)
    else:
        largest = float("-inf")
        total = 0.0
        for start in range(0, vocabulary, BLOCK_V):
            inside = start + column < vocabulary
            z = tl.load(row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(z))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest))
            largest = new_largest
        # a target outside the vocabulary must not pass for a loss
        known = (target >= 0) & (target < vocabulary)
        target_logit = tl.load(row + target, mask=known, other=float("nan")).to(tl.float32)
        tl.store(nll + token, tl.log(total) + (largest - target_logit))
        if WITH_GRADIENT:
            scale = tl.where(known, 1.0 / total, float("nan"))
            for start in range(0, vocabulary, BLOCK_V):
                inside = start + column < vocabulary
                z = tl.load(row + start + column, mask=inside, other=0.0).to(tl.float32)
                d_z = tl.exp(z - largest) * scale - tl.where(start + column == target, 1.0, 0.0)
                tl.store(row + start + column, d_z.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    ignore_index: int,
    *,
    with_gradient: bool,
) -> torch.Tensor:
    """As :func:`reference.cross_entropy_`, for contiguous bf16 and fp32 logits."""
    nll_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    if nll_C.numel():
        _linear_cross_entropy_fwd_kernel[(len(logits_CV),)](
            logits_CV,
            targets_C.contiguous(),
            nll_C,
            logits_CV.shape[1],
            ignore_index,
            WITH_GRADIENT=with_gradient,
            BLOCK_V=BLOCK_V,
            **OPTIONS,
        )
    return nll_C
