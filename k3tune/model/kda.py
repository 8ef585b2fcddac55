"""Kimi Delta Attention: projections, short convolutions, decay gate, delta rule, gated norm.

Shape letters: ``B`` batch, ``T`` tokens, ``D`` model width, ``H`` heads, ``K`` head width (keys
and values alike), ``P`` earlier inputs a convolution reads.
"""

import torch
from torch import Tensor, nn

from k3tune.model.cache import DeltaState, KDACacheLayer
from k3tune.model.documents import Documents
from k3tune.model.kda_fla import fla_accepts, kda_fla
from k3tune.model.layers import (
    KeepsDtype,
    ShortConvolution,
    widen,
    without_autocast,
    without_triton,
)
from k3tune.model.rows import KDARows
from k3tune.published.architecture import Architecture
from k3tune_kernels.kda_rule import kda_rule
from k3tune_kernels.kda_step import KdaConstants, KdaInputs, kda_step
from k3tune_kernels.rms_norm import gated_rms_norm

# The released model normalises queries and keys by sqrt(sum(x^2) + 1e-6).
_L2_EPS = 1e-6


class GatedHeadNorm(KeepsDtype):
    """``x / rms(x) * weight * sigmoid(gate)`` a head, in fp32."""

    kept_parameters = ("weight",)

    def __init__(self, size: int, eps: float, kernels: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.eps = eps
        self.backend = without_triton(kernels)

    def forward(self, x_BTHK: Tensor, gate_BTHK: Tensor) -> Tensor:
        """``[B, T, H, K]``, in the dtype of the gate."""
        return gated_rms_norm(x_BTHK, self.weight, gate_BTHK, eps=self.eps, backend=self.backend)


class KimiDeltaAttention(KeepsDtype):
    """Linear attention of 69 of K3's 93 layers (``k3`` tech report, section 2.1.1)."""

    kept_parameters = ("A_log", "dt_bias")

    def __init__(self, architecture: Architecture, kernels: str) -> None:
        super().__init__()
        self.backend = without_triton(kernels)
        hidden_size, width = architecture.hidden_size, architecture.kda_dim
        self.num_heads, self.head_dim = architecture.kda_num_heads, architecture.kda_head_dim
        self.gate_lower_bound = architecture.kda_gate_lower_bound
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, architecture.kda_conv_size, kernels)
        self.k_conv1d = ShortConvolution(width, architecture.kda_conv_size, kernels)
        self.v_conv1d = ShortConvolution(width, architecture.kda_conv_size, kernels)
        self.f_a_proj = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_heads, bias=False)
        self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.o_norm = GatedHeadNorm(self.head_dim, architecture.rms_norm_eps, kernels)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(
        self, x_BTD: Tensor, documents: Documents, cache: KDACacheLayer | KDARows | None = None
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; reads and updates ``cache`` when there is one."""
        if isinstance(cache, KDARows):
            return self.o_proj(self._step(x_BTD, cache))
        q, k, v = self._convolved(x_BTD, documents, cache)
        log_decay, beta = self._gates(x_BTD)
        with without_autocast(x_BTD):
            output = self._delta_rule(q, k, v, log_decay, beta, documents, cache)
        gated = self.o_norm(output, self._heads(self.g_proj(x_BTD)))
        return self.o_proj(gated.flatten(2))

    def _convolved(
        self, x_BTD: Tensor, documents: Documents, cache: KDACacheLayer | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected and convolved queries, keys and values, ``[B, T, H, K]`` each."""
        context = self.q_conv1d.context
        reach = documents.reach(context)
        inputs = [self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)]
        if cache is not None and cache.conv_inputs is not None:
            pasts = cache.conv_inputs
        else:
            empty = inputs[0].new_zeros(x_BTD.shape[0], context, inputs[0].shape[-1])
            pasts = (empty, empty, empty)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        outputs = [
            conv(x, past, reach) for conv, x, past in zip(convolutions, inputs, pasts, strict=True)
        ]
        if cache is not None:
            cache.keep_conv_inputs(inputs, pasts)
        q, k, v = (self._heads(x) for x in outputs)
        return q, k, v

    def _step(self, x_B1D: Tensor, rows: KDARows) -> Tensor:
        """One token of every row through convolutions, rule and gated norm; ``[B, 1, H * K]``."""
        x_BD = x_B1D[:, 0]
        if rows.derived is None:
            rows.derived = self._step_constants()
        inputs = KdaInputs(
            self.q_proj(x_BD),
            self.k_proj(x_BD),
            self.v_proj(x_BD),
            self.f_b_proj(self.f_a_proj(x_BD)),
            self.b_proj(x_BD),
            self.g_proj(x_BD),
        )
        state = (rows.inputs_BPC, rows.state_BHKV)
        gated = kda_step(inputs, rows.derived, *state, backend=self.backend)
        return gated[:, None]

    def _step_constants(self) -> KdaConstants:
        """Copies: where the trunk is sharded the weights themselves are gone between two steps."""
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return KdaConstants(
            torch.cat([conv.weight[:, 0] for conv in convolutions]).T.contiguous(),
            self.A_log.exp(),
            self.dt_bias.clone(),
            self.o_norm.weight.clone(),
            self.gate_lower_bound,
            self.o_norm.eps,
            _L2_EPS,
        )

    def _gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decay ``[B, T, H, K]`` in ``(gate_lower_bound, 0)`` and beta ``[B, T, H]``, fp32.

        A scaled sigmoid, not a clamp: ``g = bound * sigmoid(exp(A_h) * (f(x) + dt_bias))``.
        """
        logit = self._heads(widen(self.f_b_proj(self.f_a_proj(x_BTD))) + self.dt_bias)
        log_decay = (
            self.gate_lower_bound * (self.A_log.to(logit.dtype).exp()[:, None] * logit).sigmoid()
        )
        return log_decay, widen(self.b_proj(x_BTD)).sigmoid()

    def _delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Documents,
        cache: KDACacheLayer | None,
    ) -> Tensor:
        ids = documents.new_ids_BT
        if (cache is None or cache.state is None) and q.shape[1] > 1 and fla_accepts(q):
            keep = cache is not None
            output, value = kda_fla(q, k, v, log_decay, beta, documents, keep_state=keep)
            if cache is not None and value is not None:
                cache.state = DeltaState(value, None if ids is None else ids[:, -1])
            return output
        q, k, v = _unit(q) * self.head_dim**-0.5, _unit(k), widen(v)
        state = None if cache is None or cache.state is None else cache.state.entering(ids)
        bounds = documents.cu_seq_lens
        output, value = kda_rule(q, k, v, log_decay, beta, bounds, state, backend=self.backend)
        if cache is not None:
            cache.state = DeltaState(value, None if ids is None else ids[:, -1])
        return output

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def _unit(x: Tensor) -> Tensor:
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _L2_EPS)
