"""Bytes a token takes between a layer's forward and its backward, and at the backward's fullest.

Counted from what the model's modules and ops save (``k3tune/model``, ``kernels``). On a CPU the
attention runs in plain torch, which saves far more than the fused kernels of a GPU; for the CPU,
with its native kernels, the sums are held against measurement, for GPUs they are not measured.

Letters: D model width, W all KDA heads together, H heads, S sources of a mix, R LoRA rank, F
expert width, L latent width, w bytes of an activation; ``_F32`` bytes a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from k3tune.plan.layout import Layout
from k3tune.published.architecture import Architecture

_F32 = 4
_INDEX = 8
# Of fla's kernels.
_FUSED_CHUNK = 64

# F32 numbers of width W that a token's delta rule saves: convolutions 3, queries and keys 2, the
# same of unit length 2, decay and its sigmoid 2, errors 1, output 1, its gate 1.
_NATIVE_DELTA_RULE = 12
# ... and holds besides in its backward, which frees as much as it makes.
_NATIVE_DELTA_BACKWARD = 2
# The same through fla: convolutions 3, decay 3, gated norm 3; the rest is in the trunk's dtype.
_FUSED_DELTA_RULE, _FUSED_DELTA_RULE_NARROW = 9, 5
_FUSED_DELTA_BACKWARD = 6
# F32 numbers that the plain SiTU-GLU's backward holds a channel.
_PLAIN_SITU_BACKWARD = 12


class Block(NamedTuple):
    """Bytes a token of one half of a layer, attention or feed-forward.

    Attributes:
        saved: from its forward to its backward.
        backward: more, at the fullest moment of its backward.
    """

    saved: int
    backward: int


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank's activations.

    Attributes:
        inputs: of all layers, which checkpointing keeps.
        layer: the fullest layer, from its forward to its backward, less the inputs of those behind
            it, which are gone by then.
        all_layers: kept without checkpointing, with the fullest moment of a backward.
        kept: without checkpointing from the forward to the backward.
    """

    inputs: int
    layer: int
    all_layers: int
    kept: int

    @property
    def checkpointed(self) -> int:
        """With activation checkpointing."""
        return self.inputs + self.layer

    def at_most(self, checkpointing: bool) -> int:
        """At the fullest moment of the backward."""
        return self.checkpointed if checkpointing else self.all_layers

    def at_the_loss(self, checkpointing: bool) -> int:
        """While the loss is computed, which is before every backward."""
        return self.inputs if checkpointing else self.kept


def activations(
    architecture: Architecture, layout: Layout, ranks: Mapping[str, int], *, fused: bool
) -> Activations:
    """What a forward and backward of a rank's tokens hold.

    Args:
        architecture: of the base.
        layout: tokens and dtype.
        ranks: LoRA rank of each adapted module, by its name in the model.
        fused: whether a GPU's kernels run; else a CPU's native ones.
    """
    counter = _Counter(architecture, layout, ranks, fused)
    layers = list(counter.layers())
    row = layout.width * architecture.hidden_size
    inputs = layout.tokens * row * architecture.num_hidden_layers
    kept = fullest = 0
    for layer in layers:
        # the backward goes from the last layer to the first, and frees as it goes
        fullest = max(fullest, kept + layer.peak)
        kept += layer.saved
    recomputed = max(layer.peak - behind * row for behind, layer in enumerate(reversed(layers)))
    tokens = layout.tokens
    return Activations(
        inputs, tokens * recomputed, inputs + tokens * fullest, inputs + tokens * kept
    )


class _Layer(NamedTuple):
    saved: int
    peak: int


class _Counter:
    """Counts layer by layer; all figures are bytes a token."""

    def __init__(
        self, architecture: Architecture, layout: Layout, ranks: Mapping[str, int], fused: bool
    ) -> None:
        self.a = architecture
        self.length = layout.sequence_length
        self.w = layout.width
        self.ranks = ranks
        self.fused = fused
        # what plain torch saves of a value that is normed; the native norm, the value itself
        self.normed = _F32 if fused else self.w

    def layers(self) -> Iterator[_Layer]:
        """Every layer's sum, and its fullest moment."""
        a, sources = self.a, 0
        for layer in range(a.num_hidden_layers):
            row = self.w * a.hidden_size
            # a block's start banks the sum before it, and the second mix sees it too
            first = sources + 1
            sources += layer % a.attn_res_block_size == 0
            second = sources + 1
            attention = self._attention(layer)
            feed_forward = self._feed_forward(layer)
            # inputs of two norms, the sum between the halves, weights of the mixes
            common = 2 * self.normed * a.hidden_size + row + 2 * _F32 * (first + second)
            saved = common + attention.saved + feed_forward.saved
            # gradients of the bank wait for the layer that made it
            bank = second * row
            peak = max(
                saved + feed_forward.backward + bank,
                common + attention.saved + attention.backward + bank,
            )
            yield _Layer(saved, peak)

    def _attention(self, layer: int) -> Block:
        name = f"model.layers.{layer}.self_attn."
        return self._mla(name) if self.a.is_mla(layer) else self._kda(name)

    def _kda(self, name: str) -> Block:
        a, width, heads = self.a, self.a.kda_dim, self.a.kda_num_heads
        saved = self._adapted(name, {"q_proj": 0, "k_proj": 0, "v_proj": 0, "g_proj": 0})
        saved += self._input(name, ("q_proj", "k_proj", "v_proj", "g_proj"), a.hidden_size)
        saved += self._adapted(name, {"o_proj": width}) + _F32 * heads
        if self.fused:
            saved += width * (_F32 * _FUSED_DELTA_RULE + self.w * _FUSED_DELTA_RULE_NARROW)
            saved += 2 * self.w * heads * _FUSED_CHUNK
            return Block(saved, _F32 * width * _FUSED_DELTA_BACKWARD)
        saved += _F32 * _NATIVE_DELTA_RULE * width
        return Block(saved, _F32 * _NATIVE_DELTA_BACKWARD * width)

    def _mla(self, name: str) -> Block:
        a, w = self.a, self.w
        heads = a.num_attention_heads
        latent = a.kv_lora_rank + a.qk_rope_head_dim
        queries, values = heads * a.qk_head_dim, heads * a.v_head_dim
        expanded = heads * (a.qk_nope_head_dim + a.v_head_dim)
        saved = self._input(name, ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"), a.hidden_size)
        saved += self._adapted(name, {"q_a_proj": 0, "kv_a_proj_with_mqa": 0, "g_proj": 0})
        saved += self._adapted(name, {"q_b_proj": a.q_lora_rank, "kv_b_proj": 0})
        saved += self._adapted(name, {"o_proj": values})
        # both latents, normed; the output, its gate; the gated output is o_proj's input
        saved += self.normed * (a.q_lora_rank + latent) + w * (latent + 2 * values)
        if self.fused:
            saved += w * (2 * queries + expanded + values)
            return Block(saved, w * (2 * queries + expanded + values))
        # plain attention works in fp32, and keeps the weights of every key
        scores = _F32 * heads * self.length
        saved += _F32 * 2 * queries + (w * expanded if w == _F32 else _F32 * values) + scores
        # half of them is what was measured beyond one more copy of the weights
        return Block(saved, scores + scores // 2 + _F32 * (2 * queries + values))

    def _feed_forward(self, layer: int) -> Block:
        a, name = self.a, f"model.layers.{layer}."
        if not a.is_moe(layer):
            return self._mlp(f"{name}mlp.", a.intermediate_size)
        name += "block_sparse_moe."
        latent, active = a.routed_expert_hidden_size, a.num_experts_per_token
        shared = self._mlp(f"{name}shared_experts.", a.shared_intermediate_size)
        saved = shared.saved
        # the input is saved once, whoever asks for it
        if not self._is_adapted(f"{name}shared_experts.", ("gate_proj", "up_proj")):
            saved += self._input(name, ("routed_expert_down_proj",), a.hidden_size)
        saved += self._adapted(name, {"routed_expert_down_proj": 0})
        saved += self._adapted(name, {"routed_expert_up_proj": latent})
        # router's scores, ids and weights; the op's input, its output, normed
        saved += _F32 * a.num_experts + (_INDEX + 3 * _F32) * active
        saved += (self.w + self.normed) * latent
        rank = sum(self.ranks.get(f"{name}experts.{part}", 0) for part in ("w1", "w3", "w2"))
        saved += _F32 * active * rank
        rows = self.w * active * (3 * a.moe_intermediate_size + latent)
        routed = rows if self.fused else 0
        return Block(saved, max(routed + self.w * latent, shared.backward))

    def _mlp(self, name: str, inner: int) -> Block:
        saved = self._input(name, ("gate_proj", "up_proj"), self.a.hidden_size)
        saved += self._adapted(name, {"gate_proj": 0, "up_proj": 0, "down_proj": inner})
        # gate and up, and in the backward their gradients and the activation's
        saved, backward = saved + 2 * self.w * inner, 3 * self.w * inner
        if not self.fused and self.w != _F32:
            # no native kernel takes bf16 there: plain torch works on copies in fp32
            backward = (_F32 * _PLAIN_SITU_BACKWARD + self.w) * inner
        return Block(saved, backward)

    def _input(self, name: str, projections: tuple[str, ...], size: int) -> int:
        """An input that several projections read: saved for factors A, not for the frozen base."""
        return self.w * size if self._is_adapted(name, projections) else 0

    def _is_adapted(self, name: str, projections: tuple[str, ...]) -> bool:
        return any(name + projection in self.ranks for projection in projections)

    def _adapted(self, name: str, inputs: Mapping[str, int]) -> int:
        """Inputs that only these projections read, and what their factors make of them."""
        return sum(
            self.w * (size + self.ranks[name + projection])
            for projection, size in inputs.items()
            if name + projection in self.ranks
        )
