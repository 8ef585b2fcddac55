"""Operands of the gated delta rule, as a KDA layer hands them over, and its gradients."""

import torch

NAMES = ("out", "end", "q", "k", "v", "log_decay", "beta", "state")


def operands(
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    shift: float = 0.0,
) -> list[torch.Tensor]:
    """Unit queries and keys, values, log-decays in (-5, 0), betas in (0, 1) and a state.

    Args:
        shift: moves the decays' logits, whose spread is 3; 8 makes nearly all of them ``exp(-5)``.
    """
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (normal(batch, length, heads, width) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = -5 * (3 * normal(batch, length, heads, width) + shift).sigmoid()
    beta = normal(batch, length, heads).sigmoid()
    state = normal(batch, heads, width, width)
    return [x.to(dtype) for x in (q, k, v, log_decay, beta, state)]


def whole_rows(batch: int, length: int) -> torch.Tensor:
    """Bounds of rows that are a document each."""
    return torch.arange(batch + 1) * length


def random_bounds(batch: int, length: int, share: float = 0.15) -> torch.Tensor:
    """Bounds of documents; ``share`` of the tokens begin one."""
    generator = torch.Generator().manual_seed(length + 1)
    begins = torch.rand(batch, length, generator=generator) < share
    begins[:, 0] = True
    (places,) = begins.flatten().nonzero(as_tuple=True)
    return torch.cat([places, torch.tensor([batch * length])])


def differentiate(rule, tensors: list[torch.Tensor], bounds: torch.Tensor) -> dict:
    """Outputs and every gradient of a rule, by :data:`NAMES`."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, end = rule(*leaves[:5], bounds, leaves[5])
    generator = torch.Generator().manual_seed(3)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (out, end)
    ]
    gradients = torch.autograd.grad((out, end), leaves, weights)
    return dict(zip(NAMES, (out.detach(), end.detach(), *gradients), strict=True))
