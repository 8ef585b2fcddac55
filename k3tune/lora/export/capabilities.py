"""What each consumer of an adapter accepts for Kimi K3, as data: one entry an engine's release.

Read from the releases' own sources and run on their loading code. Another release is another entry.
"""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["served", "dropped", "misbound", "refused"]


@dataclass(frozen=True)
class Target:
    """How a consumer treats some modules.

    Attributes:
        pattern: of the end of a module's name.
        outcome: "served"; "dropped" (the tensors vanish without a word); "misbound" (they reach
            another module's place); "refused" (the adapter is not loaded).
        reason: what happens, for an outcome other than "served".
    """

    pattern: str
    outcome: Outcome = "served"
    reason: str = ""


@dataclass(frozen=True)
class Fault:
    """Something in the engine that must be patched before an adapter of these modules works."""

    pattern: str
    what: str
    where: str


@dataclass(frozen=True)
class Together:
    """Modules that must all be there when one of them is; the missing ones are written as zeros.

    ``names`` are last parts of module names below one parent.
    """

    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Engine:
    """One release of a consumer.

    Attributes:
        name, version: of the release.
        forms: forms of the experts' factors it reads.
        one_file: reads ``adapter_model.safetensors`` only, no shards.
        targets: the first fitting entry decides; a module without one is refused.
        max_rank_values: values its ``--max-lora-rank`` takes; empty is any.
        one_rank: the modules that must share a rank: "projection" (a layer's experts), "adapter"
            (all of it), or "none".
        one_scale: likewise for the scale; where modules may differ it honours the patterns of the
            config and rsLoRA, otherwise ``lora_alpha / r`` is all it reads.
        all_experts: an expert without factors beside one with is an error.
        together: sets of modules.
        leaf_targets: ``target_modules`` must be a list of last parts, with the experts' called
            gate_proj, up_proj and down_proj.
        shared_flag: server flag for stacked shared-outer experts.
        faults: what must be patched.
    """

    name: str
    version: str
    forms: tuple[str, ...]
    one_file: bool
    targets: tuple[Target, ...]
    max_rank_values: tuple[int, ...] = ()
    one_rank: Literal["none", "projection", "adapter"] = "none"
    one_scale: Literal["none", "projection", "adapter"] = "none"
    all_experts: bool = False
    together: tuple[Together, ...] = ()
    leaf_targets: bool = False
    shared_flag: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


_ATTENTION_OF_BOTH = r"self_attn\.(o_proj|q_a_proj|kv_a_proj_with_mqa|q_b_proj|kv_b_proj)"
_EXPERTS = r"block_sparse_moe\.experts\.(\d+\.)?w[123]"
_SHARED = r"block_sparse_moe\.shared_experts\.(gate|up|down)_proj"
_DENSE = r"mlp\.(gate|up|down)_proj"
_LATENT = r"block_sparse_moe\.routed_expert_(down|up)_proj"
_ANY = r".*"
_EXPERT_SET = ("w1", "w3", "w2")

PEFT = Engine(
    name="peft",
    version="0.21",
    forms=("per_expert",),
    one_file=False,
    targets=(Target(_ANY),),
)

VLLM = Engine(
    name="vllm",
    version="0.33.0",
    forms=("per_expert", "shared_outer"),
    one_file=True,
    targets=(
        Target(_ATTENTION_OF_BOTH),
        Target(r"self_attn\.(q|k|v|g|b|f_a|f_b)_proj"),
        Target(_EXPERTS),
        Target(_SHARED),
        Target(_DENSE),
        Target(_LATENT),
    ),
    max_rank_values=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    one_rank="projection",
    one_scale="projection",
    all_experts=True,
    together=(
        Together(_EXPERT_SET, "the experts' packing asserts that w1, w2 and w3 are all there"),
    ),
    shared_flag="--enable-moe-shared-loras",
    faults=(
        Fault(
            _ANY,
            "the K3 class has no SupportsLoRA: the server refuses --enable-lora at start; it needs "
            "the protocol's members and a mapping of the fused projections (in_proj_qkvgfab: "
            "q, k, v, g, f_a, b and the alignment slice; fused_qkv_a_g_proj: q_a, kv_a, g; "
            "gate_up_proj)",
            "models/kimi_k3/nvidia/model.py:1568, config/lora.py:147",
        ),
        Fault(
            _EXPERTS,
            "expert names default to gate_proj/up_proj/down_proj: get_expert_mapping must name "
            "w1/w2/w3",
            "model_executor/layers/fused_moe/layer.py:125",
        ),
        Fault(
            r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)",
            "small batches multiply by slices of the raw fused weight, past the adapter",
            "models/kimi_k3/nvidia/mla.py:556-575",
        ),
        Fault(
            r"self_attn\.kv_b_proj",
            "decode uses matrices absorbed from kv_b at load, past the adapter",
            "models/kimi_k3/nvidia/mla.py:440-461, 703",
        ),
        Fault(
            r"self_attn\.(q|k|v|g|b|f_a|f_b)_proj",
            "captured small batches multiply by the raw weight, past the adapter",
            "models/kimi_k3/nvidia/kda.py:919-937, mla.py:556-575",
        ),
        Fault(
            r"self_attn\.o_proj",
            "the GEMM-AR path reads the raw weight; VLLM_KIMI_K3_GEMM_AR=0 turns it off",
            "models/kimi_k3/nvidia/mla.py:633",
        ),
        Fault(
            r"routed_expert_up_proj",
            "with tensor parallelism every latent tail reads the raw weight",
            "models/kimi_k3/nvidia/latent_moe_runner.py:230, 260, 288",
        ),
    ),
)

SGLANG = Engine(
    name="sglang",
    version="0.5.23",
    forms=("per_expert", "shared_outer"),
    one_file=False,
    targets=(
        Target(_ATTENTION_OF_BOTH),
        Target(_EXPERTS),
        Target(_SHARED),
        Target(_DENSE),
        Target(
            r"self_attn\.(q|k|v)_proj",
            "dropped",
            "KDA's q, k and v are fused with g, no layer owns the name the tensors get, and they "
            "vanish without a message, strict loading included",
        ),
        Target(
            r"self_attn\.(g|b|f_a|f_b)_proj",
            "refused",
            "the name is not among the server's --lora-target-modules",
        ),
        Target(
            r"block_sparse_moe\.routed_expert_down_proj",
            "misbound",
            "its name ends like down_proj, and the tensors collide with the shared expert's",
        ),
        Target(
            r"block_sparse_moe\.routed_expert_up_proj",
            "refused",
            "the name is not among the server's --lora-target-modules",
        ),
    ),
    one_rank="adapter",
    one_scale="adapter",
    all_experts=True,
    together=(
        Together(_EXPERT_SET, "gate and up are stacked into one buffer, and down has one beside"),
        Together(("gate_proj", "up_proj"), "gate and up are stacked into one buffer"),
        Together(
            ("q_a_proj", "kv_a_proj_with_mqa"),
            "kv_a alone is skipped, and q_a alone gets a wrong B",
        ),
    ),
    leaf_targets=True,
    shared_flag="--experts-shared-outer-loras",
    faults=(
        Fault(
            _EXPERTS,
            "MXFP4 experts give no LoRA quantisation info, so a server with expert targets does "
            "not start",
            "layers/quantization/mxfp4.py:387, lora/layers.py:1143, arg_groups/lora_hook.py:212",
        ),
        Fault(
            _SHARED,
            "buffers of shared experts are not allocated (n_shared_experts against K3's "
            "num_shared_experts), and the fused front multiplies by merged raw weights",
            "lora/mem_pool.py:614, models/kimi_k3.py:711-779, 1329-1372",
        ),
        Fault(
            _DENSE,
            "KeyError 'gate_up_proj': K3 has no get_hidden_dim for it",
            "lora/mem_pool.py:1583",
        ),
        Fault(
            _EXPERTS,
            "the experts' buffers are sized by the model's width instead of the latent's",
            "lora/utils.py (default dims)",
        ),
        Fault(
            _EXPERTS,
            "gate and up rows of B are interleaved although K3 keeps them apart (SiTU's beta is "
            "read as GPT-OSS)",
            "lora/layers.py:1054, models/kimi_k3.py:512",
        ),
        Fault(
            r"self_attn\.o_proj",
            "on MLA layers the output gate disappears for all requests once o_proj is wrapped",
            "models/kimi_k3.py:2298-2317, lora/layers.py:791",
        ),
    ),
)

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (PEFT, VLLM, SGLANG)}
FORMATS = tuple(ENGINES)
