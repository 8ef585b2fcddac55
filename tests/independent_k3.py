"""Kimi K3 written a second time, for tests only: token by token, straight from the files.

No line is shared with the package: weights are decoded by looking each nibble up, KDA runs its
recurrence, MLA and the experts loop. Slow and fp64.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class IndependentK3:
    """``IndependentK3(folder).logits(ids)``: one sequence to ``[T, V]`` fp64 logits."""

    def __init__(self, folder: str | Path) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())["text_config"]
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("model*.safetensors")):
            with safe_open(file, "pt") as shard:
                for name in shard.keys():
                    if name.startswith("language_model."):
                        self.tensors[name.removeprefix("language_model.")] = shard.get_tensor(name)

    def logits(self, ids: list[int]) -> Tensor:
        """Base model, one document."""
        block = self.config["attn_res_block_size"]
        mla_layers = [layer - 1 for layer in self.config["linear_attn_config"]["full_attn_layers"]]
        running = self.weight("model.embed_tokens.weight")[torch.tensor(ids)]
        bank: list[Tensor] = []
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = self.mix([*bank, running], at + "self_attention_res") if bank else running
            attention = self.mla if layer in mla_layers else self.kda
            y = attention(self.norm(h, at + "input_layernorm"), at + "self_attn.")
            if layer % block == 0:
                bank.append(running)
                running = y
            else:
                running = running + y
            h = self.mix([*bank, running], at + "mlp_res")
            h = self.norm(h, at + "post_attention_layernorm")
            dense = layer < self.config["first_k_dense_replace"]
            running = running + (
                self.mlp(h, at + "mlp.") if dense else self.moe(h, at + "block_sparse_moe.")
            )
        h = self.norm(self.mix([*bank, running], "model.output_attn_res"), "model.norm")
        return h @ self.weight("lm_head.weight").T

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def expert(self, name: str) -> Tensor:
        packed, scale = self.tensors[name + ".weight_packed"], self.tensors[name + ".weight_scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        factor = 2.0 ** (scale.double() - 127)
        return E2M1.double()[codes] * factor.repeat_interleave(32, -1)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weight(name + ".weight")

    def mix(self, sources: list[Tensor], name: str) -> Tensor:
        query = self.weight(name + "_proj.weight")[0]
        scores = torch.stack([self.norm(s, name + "_norm") @ query for s in sources])
        weights = scores.softmax(0)
        return sum(w[:, None] * s for w, s in zip(weights, sources, strict=True))

    def situ(self, g: Tensor, u: Tensor) -> Tensor:
        b, c = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return b * (g / b).tanh() * g.sigmoid() * c * (u / c).tanh()

    def mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = (x @ self.weight(f"{at}{name}_proj.weight").T for name in ("gate", "up"))
        return self.situ(gate, up) @ self.weight(at + "down_proj.weight").T

    def moe(self, x: Tensor, at: str) -> Tensor:
        scores = (x @ self.weight(at + "gate.weight").T).sigmoid()
        biased = scores + self.weight(at + "gate.e_score_correction_bias")
        latent = x @ self.weight(at + "routed_expert_down_proj.weight").T
        mixed = torch.zeros_like(latent)
        for t in range(len(x)):
            chosen = biased[t].sort(descending=True).indices[: self.config["num_experts_per_token"]]
            total = scores[t, chosen].sum() + 1e-20
            for e in chosen.tolist():
                w1, w3, w2 = (self.expert(f"{at}experts.{e}.{w}") for w in ("w1", "w3", "w2"))
                out = w2 @ self.situ(w1 @ latent[t], w3 @ latent[t])
                mixed[t] += scores[t, e] / total * self.config["routed_scaling_factor"] * out
        routed = self.norm(mixed, at + "routed_expert_norm")
        routed = routed @ self.weight(at + "routed_expert_up_proj.weight").T
        return routed + self.mlp(x, at + "shared_experts.")

    def kda(self, x: Tensor, at: str) -> Tensor:
        linear = self.config["linear_attn_config"]
        heads, width = linear["num_heads"], linear["head_dim"]

        def convolved(name: str) -> Tensor:
            u, w = (
                x @ self.weight(f"{at}{name}_proj.weight").T,
                self.weight(f"{at}{name}_conv1d.weight"),
            )
            rows = []
            for t in range(len(u)):
                taps = range(w.shape[-1])
                back = [(j, t - w.shape[-1] + 1 + j) for j in taps]
                rows.append(sum(w[:, 0, j] * u[s] for j, s in back if s >= 0))
            y = torch.stack(rows)
            return (y * y.sigmoid()).view(len(x), heads, width)

        q, k, v = convolved("q"), convolved("k"), convolved("v")
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / width**0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        logit = x @ self.weight(at + "f_a_proj.weight").T @ self.weight(at + "f_b_proj.weight").T
        logit = (logit + self.weight(at + "dt_bias")).view(len(x), heads, width)
        rate = self.weight(at + "A_log")[:heads].exp()[:, None]
        decay = (linear["gate_lower_bound"] * (rate * logit).sigmoid()).exp()
        beta = (x @ self.weight(at + "b_proj.weight").T).sigmoid()
        gate = (x @ self.weight(at + "g_proj.weight").T).sigmoid().view(len(x), heads, width)
        out = torch.zeros_like(v)
        for h in range(heads):
            state = torch.zeros(width, width, dtype=torch.float64)
            for t in range(len(x)):
                state = decay[t, h][:, None] * state
                error = v[t, h] - state.T @ k[t, h]
                state = state + beta[t, h] * torch.outer(k[t, h], error)
                out[t, h] = state.T @ q[t, h]
        out = self.norm(out, at + "o_norm") * gate
        return out.flatten(1) @ self.weight(at + "o_proj.weight").T

    def mla(self, x: Tensor, at: str) -> Tensor:
        c, length, eps = self.config, len(x), self.config.get("mla_norm_eps", 1e-6)
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self.norm(x @ self.weight(at + "q_a_proj.weight").T, at + "q_a_layernorm", eps)
        q = (q @ self.weight(at + "q_b_proj.weight").T).view(length, heads, nope + rope)
        both = x @ self.weight(at + "kv_a_proj_with_mqa.weight").T
        latent, shared = both[:, : c["kv_lora_rank"]], both[:, c["kv_lora_rank"] :]
        kv = self.norm(latent, at + "kv_a_layernorm", eps) @ self.weight(at + "kv_b_proj.weight").T
        kv = kv.view(length, heads, nope + c["v_head_dim"])
        gate = (x @ self.weight(at + "g_proj.weight").T).sigmoid()
        out = torch.zeros(length, heads, c["v_head_dim"], dtype=torch.float64)
        for h in range(heads):
            for t in range(length):
                keys = torch.cat([kv[: t + 1, h, :nope], shared[: t + 1]], dim=-1)
                weights = (keys @ q[t, h] / (nope + rope) ** 0.5).softmax(0)
                out[t, h] = weights @ kv[: t + 1, h, nope:]
        return (out.flatten(1) * gate) @ self.weight(at + "o_proj.weight").T
