"""TRL's GRPO options held against what K3, the engines and a run that must resume can do."""

from collections.abc import Sequence

from trl import GRPOConfig

from k3tune.arguments import RolloutArguments
from k3tune.errors import ConfigError
from k3tune.option_checks import check_choice, check_integer, check_number
from k3tune.plan.layout import check_count
from k3tune.rl.rollout import Sampling
from k3tune.train.options import check_trainer

_DISTRIBUTION = (
    "the trainer's log-probabilities are those of all tokens at the temperature: tokens at the "
    "edge of a cut distribution would have no ratio, or a wrong one"
)
# Options that must be at TRL's defaults, and why.
_UNREAD = {
    "model_init_kwargs": "base, dtype and kernels say how the base is loaded",
    "trust_remote_code": "no remote code is ever run",
    "use_vllm": "engine says what samples",
    "vllm_mode": "engine says what samples",
    "vllm_importance_sampling_correction": "importance_sampling says it",
    "vllm_importance_sampling_mode": "importance_sampling says it",
    "vllm_importance_sampling_clip_max": "importance_cap says it",
    "vllm_importance_sampling_clip_min": "importance_cap says it",
    "use_transformers_continuous_batching": "engine says what samples",
    "cache_implementation": "engine says what samples",
    "generation_kwargs": "engine says what samples",
    "chat_template_kwargs": "thinking and thinking_effort say how chats are rendered",
    "top_p": _DISTRIBUTION,
    "top_k": _DISTRIBUTION,
    "min_p": _DISTRIBUTION,
    "repetition_penalty": _DISTRIBUTION,
    "max_tool_calling_iterations": "a completion is one answer",
    "cast_lm_head_to_fp32": "dtype says the head's precision",
    "sync_ref_model": "beta holds the policy near the base, which never changes",
    "use_adaptive_entropy": "a checkpoint would not hold its state: set entropy_coef",
    "log_completions_hub_repo": "nothing is uploaded",
    "log_multimodal": "K3's text model is trained",
    "router_aux_loss_coef": "K3's routers are frozen",
}

# Of TRL's GRPO; it looks at them once the first step was sampled.
_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}


def check_grpo(args: GRPOConfig) -> None:
    """Refuse options that would not be read, or would make the ratio of the policies wrong.

    Raises:
        ConfigError: naming the option, its value and the reason.
    """
    check_trainer(args, _UNREAD)
    check_count("max_completion_length", args.max_completion_length)
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(args, name), choices)
    for name in ("beta", "epsilon", "entropy_coef"):
        check_number(name, getattr(args, name), least=0)
    check_integer("num_iterations", args.num_iterations, least=1)
    check_integer("steps_per_generation", args.steps_per_generation, least=1)
    if not all(type(weight) in (int, float) for weight in args.reward_weights or ()):
        raise ConfigError(f"reward_weights are {args.reward_weights}, expected a list of numbers")
    sampling_of(args, ())


def sampling_of(args: GRPOConfig, stop_token_ids: Sequence[int]) -> Sampling:
    """The distribution a run samples from.

    Args:
        args: the run's.
        stop_token_ids: ids that end a completion.

    Raises:
        ConfigError: for a temperature or length out of range.
    """
    assert args.max_completion_length is not None, "check_grpo refuses it"
    return Sampling(
        args.max_completion_length,
        temperature=args.temperature,
        stop_token_ids=tuple(stop_token_ids),
    )


def check_combinations(args: GRPOConfig, rollout: RolloutArguments, num_rewards: int) -> None:
    """Whether routing can be replayed, and every reward has its weight.

    Raises:
        ConfigError: naming the option.
    """
    generate_every = (args.steps_per_generation or 1) * args.num_iterations
    aligned = args.gradient_accumulation_steps % generate_every == 0
    if rollout.routing == "replay" and not aligned:
        raise ConfigError(
            f"routing is 'replay' and samples serve {generate_every} batches, expected at most "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}): TRL's forward "
            "for the older policy would not replay them"
        )
    if args.reward_weights is not None and len(args.reward_weights) != num_rewards:
        raise ConfigError(
            f"reward_weights are {args.reward_weights}, expected one for each of the "
            f"{num_rewards} rewards"
        )


def check_overlap(args: GRPOConfig, rollout: RolloutArguments) -> None:
    """Whether every step can have samples of its own, taken one step ahead.

    Raises:
        ConfigError: naming the option.
    """
    every = (args.steps_per_generation or 1) * args.num_iterations
    if every != args.gradient_accumulation_steps:
        raise ConfigError(
            f"samples serve {every} batches and gradient_accumulation_steps is "
            f"{args.gradient_accumulation_steps}, expected as many: with overlap every step has "
            "its own samples"
        )
    if rollout.on_stale_version != "correct":
        raise ConfigError(
            f"on_stale_version is {rollout.on_stale_version!r}, expected 'correct': samples taken "
            "ahead are one version old, and weighed for it"
        )
