"""Gated multi-head latent attention without positions.

Shape letters: ``B`` batch, ``T`` new tokens, ``S`` all tokens, ``D`` model width, ``H`` heads,
``K`` / ``V`` query-key / value head width, ``L`` latent width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3tune.model.cache import MLACacheLayer
from k3tune.model.documents import Documents
from k3tune.model.layers import RMSNorm, widen, without_autocast, without_triton
from k3tune.model.rows import MLARows
from k3tune.published.architecture import Architecture
from k3tune_kernels.latent_attention import latent_attention

# Queries attended at once: bounds the mask and, where no fused kernel applies, the scores.
_QUERY_BLOCK = 1024
# Of several documents a row, where a block sees its own documents only: a CPU takes 32 ms for 1,800
# tokens in 31 documents, forward and backward of k3-nano's heads, and 141 ms by blocks of 1024.
_DOCUMENTS_BLOCK = 128


class GatedMLA(nn.Module):
    """Full attention of 24 of K3's 93 layers (tech report, section 2.1.2)."""

    def __init__(self, architecture: Architecture, kernels: str) -> None:
        super().__init__()
        self.kernels = kernels
        hidden_size, heads = architecture.hidden_size, architecture.num_attention_heads
        self.num_heads = heads
        self.kv_lora_rank = architecture.kv_lora_rank
        self.nope_dim, self.rope_dim = architecture.qk_nope_head_dim, architecture.qk_rope_head_dim
        self.v_head_dim = architecture.v_head_dim
        eps = architecture.mla_norm_eps
        self.q_a_proj = nn.Linear(hidden_size, architecture.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(architecture.q_lora_rank, eps, kernels)
        self.q_b_proj = nn.Linear(
            architecture.q_lora_rank, heads * architecture.qk_head_dim, bias=False
        )
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden_size, self.kv_lora_rank + self.rope_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, eps, kernels)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank, heads * (self.nope_dim + self.v_head_dim), bias=False
        )
        self.g_proj = nn.Linear(hidden_size, heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden_size, bias=False)

    def forward(
        self, x_BTD: Tensor, documents: Documents, cache: MLACacheLayer | MLARows | None = None
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; reads and extends ``cache`` when there is one."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BHTK = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x_BTD).split(
            [self.kv_lora_rank, self.rope_dim], dim=-1
        )
        compressed = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)
        if isinstance(cache, MLARows):
            attended = self._attend_latents(q_BHTK, compressed, cache)
        else:
            if cache is not None:
                compressed = cache.extend(compressed)
            k_BHSK, v_BHSV = self._expand(compressed)
            attended = _attend(q_BHTK, k_BHSK, v_BHSV, documents)
        gated = attended.transpose(1, 2).flatten(2) * self.g_proj(x_BTD).sigmoid()
        return self.o_proj(gated)

    def _attend_latents(self, q_BH1K: Tensor, compressed_B1L: Tensor, rows: MLARows) -> Tensor:
        """Attention of one new token a row over the compressed tokens, which stay compressed.

        ``q . (W_k c) = (W_k^T q) . c``, and the sum of ``W_v c`` is ``W_v`` of the sum: what a
        cached token costs does not depend on the heads' widths. In fp32; ``[B, H, 1, V]``.
        """
        with without_autocast(q_BH1K):
            if rows.derived is None:
                rows.derived = self._absorbed_weights(compressed_B1L)
            key_HKL, value_HLV = rows.derived
            compressed_BSL, last_place_B = rows.extend(compressed_B1L[:, 0])
            nope, shared = widen(q_BH1K[:, :, 0]).split([self.nope_dim, self.rope_dim], dim=-1)
            latent_q = (nope.transpose(0, 1) @ key_HKL).transpose(0, 1)
            summed_BHL = latent_attention(
                torch.cat([latent_q, shared], dim=-1),
                widen(compressed_BSL),
                last_place_B,
                value_width=self.kv_lora_rank,
                scale=(self.nope_dim + self.rope_dim) ** -0.5,
                backend=without_triton(self.kernels),
            )
            attended = (summed_BHL.transpose(0, 1) @ value_HLV).transpose(0, 1)
        return attended[:, :, None].to(q_BH1K.dtype)

    def _absorbed_weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """``W_k`` ``[H, K, L]`` and ``W_v`` ``[H, L, V]`` of ``kv_b_proj``, in fp32.

        Asked of the module itself, which an adapter may wrap.
        """
        unit = torch.eye(self.kv_lora_rank, dtype=like.dtype, device=like.device)
        expanded_LHX = widen(self.kv_b_proj(unit)).unflatten(-1, (self.num_heads, -1))
        k, v = expanded_LHX.split([self.nope_dim, self.v_head_dim], dim=-1)
        return k.permute(1, 2, 0).contiguous(), v.permute(1, 0, 2).contiguous()

    def _expand(self, compressed_BSL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads; the un-normalised part is shared by the heads."""
        latent, shared = compressed_BSL.split([self.kv_lora_rank, self.rope_dim], dim=-1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = expanded.split([self.nope_dim, self.v_head_dim], dim=-1)
        shared = shared[:, None].expand(-1, self.num_heads, -1, -1).to(k.dtype)
        return torch.cat([k, shared], dim=-1), v


def _attend(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside documents, block by block over the queries; ``[B, H, T, V]``."""
    length, total = q_BHTK.shape[2], k_BHSK.shape[2]
    past, first_keys = total - length, documents.first_keys
    block = _QUERY_BLOCK if first_keys is None else _DOCUMENTS_BLOCK
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        keys = slice(0 if first_keys is None else first_keys[start], past + stop)
        mask = _visible(past + start, keys, documents.ids_BS, q_BHTK.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q_BHTK[:, :, start:stop],
                k_BHSK[:, :, keys],
                v_BHSV[:, :, keys],
                attn_mask=mask,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _visible(start: int, keys: slice, ids_BS: Tensor | None, device: torch.device) -> Tensor | None:
    """Which of the ``keys`` the queries ``start..keys.stop`` see; None when all.

    Returns:
        bool ``[queries, keys]``, or ``[B, 1, queries, keys]`` with documents.
    """
    queries = slice(start, keys.stop)
    if ids_BS is None and keys.stop - start == 1:
        return None
    places = torch.arange(keys.stop, device=device)
    causal = places[queries, None] >= places[None, keys]
    if ids_BS is None:
        return causal
    same = ids_BS[:, queries, None] == ids_BS[:, None, keys]
    return (causal & same)[:, None]
