"""Pieces every K3 layer is built from: F32 islands, RMSNorm, the SiTU MLP, the residual mixer.

Shape letters: ``B`` batch, ``T`` tokens, ``D`` model width, ``...`` any leading dimensions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from k3tune.published.architecture import Architecture
from k3tune_kernels.attention_residual import attention_residual
from k3tune_kernels.rms_norm import rms_norm
from k3tune_kernels.short_convolution import short_convolution
from k3tune_kernels.situ_glu import situ_glu

_NOTHING = nullcontext()


def widen(x: Tensor) -> Tensor:
    """``x`` in at least fp32: the dtype of K3's F32 islands. fp64 stays fp64 (gradient checks)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which matmuls keep their operands' dtype on ``x``'s device."""
    device = x.device.type
    # entered many times a token: where there is nothing to switch off it costs nothing
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def without_triton(kernels: str) -> str:
    """The backend of an op that has no Triton kernel to insist on."""
    return "reference" if kernels == "reference" else "auto"


class KeepsDtype(nn.Module):
    """A module whose own parameters named in ``kept_parameters`` keep their dtype.

    F32 tensors of the checkpoint, which rounding to BF16 would change, and packed bytes.
    ``.to(dtype)``, ``.bfloat16()`` and a training engine's casts still move them between devices.
    """

    kept_parameters: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {id(self._parameters[name]) for name in self.kept_parameters}

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        return super()._apply(move_only, recurse)


class RMSNorm(nn.Module):
    """``weight * cast(x / sqrt(mean(x^2) + eps))``: normalised in fp32, rounded, then weighted."""

    def __init__(self, size: int, eps: float, kernels: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.backend = without_triton(kernels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension; shape and dtype are kept."""
        return rms_norm(x, self.weight, eps=self.eps, backend=self.backend)


class SituMLP(nn.Module):
    """``down(SiTU-GLU(gate(x), up(x)))``: layer 0's dense MLP and the fused shared experts."""

    def __init__(self, architecture: Architecture, intermediate_size: int, kernels: str) -> None:
        super().__init__()
        hidden_size = architecture.hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.beta = architecture.activation_situ_beta
        self.linear_beta = architecture.activation_situ_linear_beta
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``, in the projections' dtype."""
        activated = situ_glu(
            self.gate_proj(x),
            self.up_proj(x),
            beta=self.beta,
            linear_beta=self.linear_beta,
            backend=self.kernels,
        )
        return self.down_proj(activated)


class ResidualQuery(nn.Module):
    """Holds a mixer's pseudo-query ``[1, D]`` under its published name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size))


def mix_residuals(
    sources: Sequence[Tensor], norm: RMSNorm, query: ResidualQuery, kernels: str
) -> Tensor:
    """Attention over the residual bank (K3 tech report, eq. 8 to 10).

    Args:
        sources: the banked block sums and, last, the running sum; each ``[..., D]``.
        norm, query: weights of the score; the mixed values are not normalised.
        kernels: backend of the op.

    Returns:
        ``[..., D]`` in the sources' dtype, computed in fp32.
    """
    return attention_residual(
        sources, norm.weight, query.weight.flatten(), eps=norm.eps, backend=kernels
    )


class ShortConvolution(KeepsDtype):
    """Depthwise causal convolution and SiLU over each document, fp32 inside."""

    kept_parameters = ("weight",)

    def __init__(self, channels: int, size: int, kernels: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, size, dtype=torch.float32))
        self.backend = without_triton(kernels)

    @property
    def context(self) -> int:
        """Earlier inputs that a token reads."""
        return self.weight.shape[-1] - 1

    def forward(self, x_BTC: Tensor, past_BPC: Tensor, reach_BTP: Tensor | None) -> Tensor:
        """``SiLU(sum_j w[c, j] x[t - context + j, c])``.

        Args:
            x_BTC: inputs.
            past_BPC: the ``context`` inputs before them (zeros at a sequence's start).
            reach_BTP: whether the token ``context - j`` back belongs to the same document, bool
                ``[B, T, context]``; None when every row is one document.

        Returns:
            ``[B, T, C]`` in the dtype of ``x_BTC``.
        """
        return short_convolution(x_BTC, past_BPC, self.weight, reach_BTP, backend=self.backend)
