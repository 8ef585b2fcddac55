"""Options of a run beside TRL's own: what a recipe's YAML and flags may say. Standard library only.

TRL's parser converts flags and YAML strings by the field's type, but takes other YAML values and
choices as they come: every field is therefore checked here, with the value that was seen.
"""

from dataclasses import dataclass, field

from k3tune.errors import ConfigError
from k3tune.lora.spec import LoraSpec
from k3tune.option_checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_optional,
    check_text,
    read_mapping,
)
from k3tune.rollout_arguments import (
    ACTIVATIONS,
    IMPORTANCE_MODES,
    MonitorArguments,
    RewardArguments,
    RolloutArguments,
)

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "IMPORTANCE_MODES",
    "KERNELS",
    "DataArguments",
    "LoraArguments",
    "ModelArguments",
    "MonitorArguments",
    "ParallelArguments",
    "PromptArguments",
    "RewardArguments",
    "RolloutArguments",
    "RunArguments",
    "SampleArguments",
]

DTYPES = ("bfloat16", "float32")
KERNELS = ("auto", "triton", "cpu", "reference")
BAD_SAMPLES = ("skip", "error")
EFFORTS = ("none", "low", "high", "max")


@dataclass
class ModelArguments:
    """The frozen base."""

    base: str = field(
        metadata={"help": "Folder of the published checkpoint, or its hub id. Never written to."}
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "Folder with tiktoken.model; default: the base's folder."},
    )
    dtype: str = field(
        default="bfloat16",
        metadata={
            "help": "Dtype of the base's trunk: bfloat16 or float32. Experts stay packed, tensors "
            "published in F32 stay F32, LoRA factors are FP32 either way.",
        },
    )
    kernels: str = field(
        default="auto",
        metadata={"help": "Backend of every kernel: auto, triton, cpu or reference (plain torch)."},
    )

    def __post_init__(self) -> None:
        check_text("base", self.base)
        check_optional(check_text, "tokenizer", self.tokenizer)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kernels", self.kernels, KERNELS)

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer's files are."""
        return self.base if self.tokenizer is None else self.tokenizer


@dataclass
class LoraArguments:
    """The adapter to train."""

    lora_targets: list[str] = field(
        default_factory=lambda: ["attention", "latent", "experts", "shared_experts"],
        metadata={
            "help": "Groups to adapt (attention, latent, experts, shared_experts, dense), or "
            "patterns of a module name's end."
        },
    )
    lora_rank: int = field(
        default=16, metadata={"help": "Rank of the factors; memory grows with it."}
    )
    lora_alpha: float = field(
        default=32.0, metadata={"help": "The update is scaled by lora_alpha / lora_rank."}
    )
    lora_form: str = field(
        default="per_expert",
        metadata={
            "help": "Factors of the experts: per_expert, or shared_outer (those on the latent's "
            "side shared by a layer's experts: half the size)."
        },
    )
    lora_rank_pattern: dict[str, int] | str | None = field(
        default=None,
        metadata={
            "help": "Other ranks by pattern of a module name's end; a mapping, or its JSON as flag."
        },
    )
    lora_alpha_pattern: dict[str, float] | str | None = field(
        default=None, metadata={"help": "Other alphas by pattern, in the same way."}
    )
    lora_layers: list[int] | None = field(
        default=None, metadata={"help": "Zero-based layers to adapt; default: all."}
    )
    lora_rslora: bool = field(
        default=False, metadata={"help": "Scale by lora_alpha / sqrt(lora_rank) instead."}
    )
    lora_dropout: float = field(
        default=0.0,
        metadata={"help": "Dropout on the input of linear modules, 0 to below 1; not on experts."},
    )
    lora_init: str = field(
        default="kaiming", metadata={"help": "Start of A: kaiming or gaussian. B starts at zero."}
    )
    adapter: str | None = field(
        default=None,
        metadata={
            "help": "Go on with this adapter folder instead of a new one: its files decide "
            "targets, ranks and form, and the lora_* options are not used."
        },
    )

    def __post_init__(self) -> None:
        self.lora_rank_pattern = read_mapping("lora_rank_pattern", self.lora_rank_pattern)
        self.lora_alpha_pattern = read_mapping("lora_alpha_pattern", self.lora_alpha_pattern)
        check_flag("lora_rslora", self.lora_rslora)
        check_optional(check_text, "adapter", self.adapter)
        self.spec(seed=0)

    def spec(self, seed: int) -> LoraSpec:
        """What :func:`k3tune.lora.attach_lora` takes.

        Args:
            seed: of the start of A.

        Raises:
            ConfigError: naming the first option that is not usable.
        """
        try:
            return LoraSpec(
                targets=self.lora_targets,  # type: ignore[arg-type]  # the spec checks and copies
                rank=self.lora_rank,
                alpha=self.lora_alpha,
                form=self.lora_form,
                rank_pattern=self.lora_rank_pattern or {},  # type: ignore[arg-type]
                alpha_pattern=self.lora_alpha_pattern or {},  # type: ignore[arg-type]
                layers=self.lora_layers,  # type: ignore[arg-type]
                use_rslora=self.lora_rslora,
                dropout=self.lora_dropout,
                init=self.lora_init,
                seed=seed,
            )
        except ConfigError as error:
            # a sentence about the spec begins with its field: the option without its prefix
            raise ConfigError(f"lora_{error}") from error


@dataclass
class SampleArguments:
    """Where samples come from and how they are read; lengths and packing are TRL's options."""

    train_path: str = field(
        metadata={
            "help": "Training samples: a .jsonl, .json, .parquet or .csv file, a dataset folder or "
            "a dataset's name. SFT reads messages, prompt and completion, or text; RL prompt, "
            "with every other column handed to the rewards."
        }
    )
    eval_path: str | None = field(
        default=None, metadata={"help": "Evaluation samples, in the same forms."}
    )
    on_bad_sample: str = field(
        default="skip",
        metadata={
            "help": "skip leaves out, counts and reports samples that cannot be trained on; error "
            "refuses the data."
        },
    )
    thinking: bool = field(
        default=True, metadata={"help": "Render chats in K3's thinking mode (--no_thinking: off)."}
    )
    thinking_effort: str = field(
        default="max",
        metadata={
            "help": "Effort said in the prompt, some 200 tokens: low, high or max; none leaves it "
            "out."
        },
    )

    def __post_init__(self) -> None:
        check_text("train_path", self.train_path)
        check_optional(check_text, "eval_path", self.eval_path)
        check_choice("on_bad_sample", self.on_bad_sample, BAD_SAMPLES)
        check_flag("thinking", self.thinking)
        check_choice("thinking_effort", self.thinking_effort, EFFORTS)


@dataclass
class DataArguments(SampleArguments):
    """Data of SFT."""

    eval_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Fraction of the training samples held out for evaluation instead, from 0 to "
            "below 1; which ones depends on the seed alone."
        },
    )
    train_opening_tag: bool = field(
        default=True,
        metadata={"help": "Whether the tag that opens the first channel of an answer bears loss."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eval_fraction", self.eval_fraction, least=0, below=1)
        if self.eval_path is not None and self.eval_fraction:
            raise ConfigError(
                f"eval_path is {self.eval_path!r} and eval_fraction is {self.eval_fraction:g}, "
                "expected one of them: leave the other out"
            )
        check_flag("train_opening_tag", self.train_opening_tag)

    @property
    def has_evaluation(self) -> bool:
        """Whether anything is held out or given for evaluation."""
        return self.eval_path is not None or self.eval_fraction > 0


@dataclass
class PromptArguments(SampleArguments):
    """Data of RL."""

    max_prompt_length: int = field(
        default=4096,
        metadata={"help": "Longest prompt, in tokens; a longer one is a bad sample, none is cut."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("max_prompt_length", self.max_prompt_length, least=1)


@dataclass
class ParallelArguments:
    """How the base is spread over processes; a resumed run may change all of it."""

    expert_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Processes that share one set of experts, each holding its part; a divisor of "
            "all processes, which DeepSpeed ZeRO-1 or -2 must run. Higher = less memory, more "
            "traffic."
        },
    )
    expert_placement: str | None = field(
        default=None,
        metadata={
            "help": "File that says which rank holds which experts, made from measured routing; "
            "default: experts in a row."
        },
    )
    deduplicate_dispatch: bool = field(
        default=False,
        metadata={
            "help": "Send a token once to each rank that holds some of its experts, not once to "
            "each expert: fewer bytes, a little more work."
        },
    )
    mxfp8_dispatch: bool = field(
        default=False,
        metadata={
            "help": "Round tokens to MXFP8 on the way to their experts: half the bytes of bfloat16 "
            "there, another result."
        },
    )
    trunk_shard: str = field(
        default="none",
        metadata={
            "help": "Spread the frozen weights that are no experts, layer by layer: none, node "
            "(over the processes of a machine) or a number of processes in a row."
        },
    )

    def __post_init__(self) -> None:
        check_integer("expert_parallel_size", self.expert_parallel_size, least=1)
        check_optional(check_text, "expert_placement", self.expert_placement)
        check_flag("deduplicate_dispatch", self.deduplicate_dispatch)
        check_flag("mxfp8_dispatch", self.mxfp8_dispatch)
        if type(self.trunk_shard) is int:
            self.trunk_shard = str(self.trunk_shard)
        check_text("trunk_shard", self.trunk_shard)
        number = self.trunk_shard.isdecimal() and int(self.trunk_shard) >= 1
        if self.trunk_shard not in ("none", "node") and not number:
            raise ConfigError(
                f"trunk_shard is {self.trunk_shard!r}, expected none, node or a number of processes"
            )
        if self.expert_parallel_size == 1:
            for name in ("expert_placement", "deduplicate_dispatch", "mxfp8_dispatch"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r} and expert_parallel_size is 1, which "
                        "would not read it: leave it out"
                    )


@dataclass
class RunArguments:
    """What the command does beside training."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Print the resolved config, the trainable parameters by group and a memory "
            "estimate, and exit: reads no more than the base's config.json and the rewards' code."
        },
    )

    def __post_init__(self) -> None:
        check_flag("dry_run", self.dry_run)
