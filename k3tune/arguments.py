"""Options of a run beside TRL's own: what a recipe's YAML and flags may say. Standard library only.

TRL's parser converts flags and YAML strings by the field's type, but takes other YAML values and
choices as they come: every field is therefore checked here, with the value that was seen.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3tune.errors import ConfigError

DTYPES = ("bfloat16", "float32")
KERNELS = ("auto", "triton", "cpu", "reference")
FORMS = ("per_expert", "shared_outer")
INITS = ("kaiming", "gaussian")
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
        metadata={"help": "Backend of every kernel: auto, triton or reference (plain torch)."},
    )

    def __post_init__(self) -> None:
        _text("base", self.base)
        _optional(_text, "tokenizer", self.tokenizer)
        _choice("dtype", self.dtype, DTYPES)
        _choice("kernels", self.kernels, KERNELS)

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
        _list("lora_targets", self.lora_targets, str)
        _integer("lora_rank", self.lora_rank, least=1)
        _number("lora_alpha", self.lora_alpha, above=0)
        _choice("lora_form", self.lora_form, FORMS)
        self.lora_rank_pattern = _mapping("lora_rank_pattern", self.lora_rank_pattern)
        self.lora_alpha_pattern = _mapping("lora_alpha_pattern", self.lora_alpha_pattern)
        for key, rank in (self.lora_rank_pattern or {}).items():
            _integer(f"lora_rank_pattern[{key!r}]", rank, least=1)
        for key, alpha in (self.lora_alpha_pattern or {}).items():
            _number(f"lora_alpha_pattern[{key!r}]", alpha, above=0)
        if self.lora_layers is not None:
            _list("lora_layers", self.lora_layers, int)
            for layer in self.lora_layers:
                _integer("lora_layers", layer, least=0)
        _flag("lora_rslora", self.lora_rslora)
        _number("lora_dropout", self.lora_dropout, least=0, below=1)
        _choice("lora_init", self.lora_init, INITS)
        _optional(_text, "adapter", self.adapter)

    def spec_fields(self, seed: int) -> dict[str, Any]:
        """The fields of a ``k3tune.lora.LoraSpec``.

        Args:
            seed: of the start of A.
        """
        return {
            "targets": tuple(self.lora_targets),
            "rank": self.lora_rank,
            "alpha": self.lora_alpha,
            "form": self.lora_form,
            "rank_pattern": self.lora_rank_pattern or {},
            "alpha_pattern": self.lora_alpha_pattern or {},
            "layers": None if self.lora_layers is None else tuple(self.lora_layers),
            "use_rslora": self.lora_rslora,
            "dropout": self.lora_dropout,
            "init": self.lora_init,
            "seed": seed,
        }


@dataclass
class DataArguments:
    """Where samples come from and how they are read; lengths and packing are TRL's options."""

    train_path: str = field(
        metadata={
            "help": "Training samples: a .jsonl, .json, .parquet or .csv file, a dataset folder or "
            "a dataset's name, with messages, prompt and completion, or text."
        }
    )
    eval_path: str | None = field(
        default=None, metadata={"help": "Evaluation samples, in the same forms."}
    )
    eval_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Fraction of the training samples held out for evaluation instead, from 0 to "
            "below 1; which ones depends on the seed alone."
        },
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
    train_opening_tag: bool = field(
        default=True,
        metadata={"help": "Whether the tag that opens the first channel of an answer bears loss."},
    )

    def __post_init__(self) -> None:
        _text("train_path", self.train_path)
        _optional(_text, "eval_path", self.eval_path)
        _number("eval_fraction", self.eval_fraction, least=0, below=1)
        if self.eval_path is not None and self.eval_fraction:
            raise ConfigError(
                f"eval_path is {self.eval_path!r} and eval_fraction is {self.eval_fraction:g}, "
                "expected one of them: leave the other out"
            )
        _choice("on_bad_sample", self.on_bad_sample, BAD_SAMPLES)
        _flag("thinking", self.thinking)
        _choice("thinking_effort", self.thinking_effort, EFFORTS)
        _flag("train_opening_tag", self.train_opening_tag)

    @property
    def has_evaluation(self) -> bool:
        """Whether anything is held out or given for evaluation."""
        return self.eval_path is not None or self.eval_fraction > 0


@dataclass
class RunArguments:
    """What the command does beside training."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Print the resolved config, the trainable parameters by group and a memory "
            "estimate, and exit: reads the base's config.json and nothing else."
        },
    )

    def __post_init__(self) -> None:
        _flag("dry_run", self.dry_run)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {value!r}, expected a text that is not empty")


def _optional(check: Callable[[str, Any], None], name: str, value: Any) -> None:
    if value is not None:
        check(name, value)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{name} is {value!r}, expected true or false")


def _integer(name: str, value: Any, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}")


def _number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float = float("inf"),
) -> None:
    fits = type(value) in (int, float) and value < below
    if fits and least is not None:
        fits = value >= least
    if fits and above is not None:
        fits = value > above
    if not fits:
        low = f"of at least {least:g}" if above is None else f"above {above:g}"
        high = "" if below == float("inf") else f" and below {below:g}"
        raise ConfigError(f"{name} is {value!r}, expected a number {low}{high}")


def _list(name: str, value: Any, kind: type) -> None:
    # a lone string would be taken letter by letter
    wanted = f"a list of {'texts' if kind is str else 'integers'}"
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} is {value!r}, expected {wanted} that is not empty")
    for item in value:
        if type(item) is not kind:
            raise ConfigError(f"{name} holds {item!r}, expected {wanted}")


def _mapping(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} is {value!r}, expected a mapping of pattern to number as JSON ({error})"
            ) from error
    if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
        raise ConfigError(f"{name} is {value!r}, expected a mapping of pattern to number")
    return dict(read)
