"""Options of a run that learns from what it samples: rollouts, rewards, the monitor.

Checked as those in :mod:`k3tune.arguments`, which has them too. Standard library only.
"""

from dataclasses import dataclass, field

from k3tune.errors import ConfigError
from k3tune.option_checks import (
    check_choice,
    check_flag,
    check_integer,
    check_list,
    check_number,
)

ADAPTER_DTYPES = ("bfloat16", "float32")
ENGINES = ("local", "k3tune", "vllm", "sglang")
ACTIVATIONS = ("none", "bf16", "mxfp8")
ROUTINGS = ("ignore", "compare", "replay")
IMPORTANCE_MODES = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)
ON_STALE = ("error", "correct")
ON_UNCHANGED = ("error", "count")
ON_BAD_REWARD = ("error", "skip")


@dataclass
class RolloutArguments:
    """Who samples, under which numerics, and what becomes of the difference to the trainer."""

    engine: str = field(
        default="local",
        metadata={
            "help": "What samples: local (in this process, from the same packed weights), or the "
            "servers of engine_urls: k3tune (k3tune serve), vllm or sglang."
        },
    )
    engine_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "Addresses of the servers. Adapters go by path: they must see output_dir under "
            "the name it has here."
        },
    )
    rollout_batch_size: int = field(
        default=64, metadata={"help": "Completions sampled together; higher = more memory."}
    )
    activations: str = field(
        default="none",
        metadata={
            "help": "Rounding of the experts' inputs while sampling, as real engines do it: none, "
            "bf16 or mxfp8."
        },
    )
    train_activations: str = field(
        default="none",
        metadata={
            "help": "The same in training, straight-through in the backward: set it to what the "
            "engine does, and the mismatch falls to that of equal numerics."
        },
    )
    rollout_adapter_dtype: str = field(
        default="float32",
        metadata={"help": "Dtype of the factors while sampling: float32, or bfloat16 as servers."},
    )
    routing: str = field(
        default="ignore",
        metadata={
            "help": "The rollout's experts: ignore, compare (log how often the trainer's differ) "
            "or replay (train with them, and log both)."
        },
    )
    importance_sampling: str = field(
        default="token_truncate",
        metadata={
            "help": "Weight of train over rollout probability: token_truncate (cut at the cap), "
            "token_mask (0 outside of 1 / cap to cap), sequence_truncate, sequence_mask (the same "
            "with the geometric mean over the completion), or none."
        },
    )
    importance_cap: float = field(
        default=3.0, metadata={"help": "Largest such weight, above 1; see importance_sampling."}
    )
    on_stale_version: str = field(
        default="error",
        metadata={
            "help": "A sample of another adapter version than the trainer's: error, or correct "
            "(counted, and weighed by importance_sampling)."
        },
    )
    overlap: bool = field(
        default=False,
        metadata={
            "help": "Let servers sample the next step's prompts while this one trains: samples are "
            "one version old, so on_stale_version must be correct."
        },
    )
    on_unchanged_push: str = field(
        default="error",
        metadata={
            "help": "A pushed adapter in which nothing changed though the step had a gradient: "
            "error, or count."
        },
    )
    keep_rollouts: int = field(
        default=2,
        metadata={"help": "Newest steps whose samples stay in output_dir/rollouts, at least 1."},
    )

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        if (self.engine == "local") != (self.engine_urls is None):
            raise ConfigError(
                f"engine is {self.engine!r} and engine_urls is {self.engine_urls!r}, expected "
                "addresses of servers, and none for the local one"
            )
        if self.engine_urls is not None:
            check_list("engine_urls", self.engine_urls, str)
        check_integer("rollout_batch_size", self.rollout_batch_size, least=1)
        check_choice("activations", self.activations, ACTIVATIONS)
        check_choice("train_activations", self.train_activations, ACTIVATIONS)
        check_choice("rollout_adapter_dtype", self.rollout_adapter_dtype, ADAPTER_DTYPES)
        check_choice("routing", self.routing, ROUTINGS)
        check_choice("importance_sampling", self.importance_sampling, IMPORTANCE_MODES)
        check_number("importance_cap", self.importance_cap, above=1)
        check_choice("on_stale_version", self.on_stale_version, ON_STALE)
        check_choice("on_unchanged_push", self.on_unchanged_push, ON_UNCHANGED)
        check_integer("keep_rollouts", self.keep_rollouts, least=1)
        if self.on_stale_version == "correct" and self.importance_sampling == "none":
            raise ConfigError(
                "on_stale_version is 'correct' and importance_sampling is 'none', expected a mode "
                "such as token_truncate: it is what corrects"
            )
        check_flag("overlap", self.overlap)
        if self.overlap and (self.engine == "local" or self.on_stale_version != "correct"):
            raise ConfigError(
                f"overlap is True, engine is {self.engine!r} and on_stale_version is "
                f"{self.on_stale_version!r}, expected servers (k3tune, vllm, sglang) and "
                "'correct': samples taken ahead are one version old, and weighed for it"
            )


@dataclass
class RewardArguments:
    """What a completion is worth; TRL's reward_weights go with it."""

    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={
            "help": "Functions of TRL's signature, summed: exact_match (with the column answer), "
            "format, reasoning_gym (with answer and metadata), file.py:function, or "
            "module:function."
        },
    )
    reward_deadline_s: float = field(
        default=300.0,
        metadata={"help": "Seconds a reward function may take for a step's samples."},
    )
    on_bad_reward: str = field(
        default="error",
        metadata={
            "help": "A function that raises, hangs, or returns no finite number for a sample: "
            "error, or skip (counted; the sample has no reward from it)."
        },
    )

    def __post_init__(self) -> None:
        check_list("rewards", self.rewards, str)
        check_number("reward_deadline_s", self.reward_deadline_s, above=0)
        check_choice("on_bad_reward", self.on_bad_reward, ON_BAD_REWARD)


@dataclass
class MonitorArguments:
    """The train-rollout KL, held against a floor that is measured before the first step."""

    floor_prompts: int = field(
        default=16,
        metadata={"help": "Prompts the floor is measured on, at least 4; 0 measures none."},
    )
    floor_samples: int = field(default=4, metadata={"help": "Completions of each, at least 1."})
    canary: bool = field(
        default=True,
        metadata={
            "help": "Score pinned completions by engine and trainer at every version "
            "(--no_canary: off)."
        },
    )
    stop_on_alarm: bool = field(
        default=False,
        metadata={"help": "End the run, with a checkpoint, after a step that raised an alarm."},
    )

    def __post_init__(self) -> None:
        check_integer("floor_prompts", self.floor_prompts, least=0)
        if 0 < self.floor_prompts < 4:
            raise ConfigError(
                f"floor_prompts is {self.floor_prompts}, expected 0 or at least 4: an interval "
                "comes from how prompts differ"
            )
        check_integer("floor_samples", self.floor_samples, least=1)
        check_flag("canary", self.canary)
        check_flag("stop_on_alarm", self.stop_on_alarm)
