"""What a GRPO run would train and hold in memory, from the base's config alone: ``--dry_run``."""

from trl import GRPOConfig

from k3tune.arguments import (
    LoraArguments,
    ModelArguments,
    MonitorArguments,
    ParallelArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
)
from k3tune.plan.layout import check_count
from k3tune.rl.options import check_combinations, check_grpo, check_overlap
from k3tune.rl.setup import build_rewards
from k3tune.train.plan import describe


def describe_grpo(
    model: ModelArguments,
    lora: LoraArguments,
    prompts: PromptArguments,
    reward: RewardArguments,
    rollout: RolloutArguments,
    monitor: MonitorArguments,
    training: GRPOConfig,
    parallel: ParallelArguments | None = None,
) -> str:
    """Resolved config, trainable parameters by group and a memory estimate, for people.

    The rewards are found, which runs the code of modules they are in, and are not called. Left out
    of the estimate: what the local engine holds while it samples (its copy of the factors and the
    caches of ``rollout_batch_size`` completions).

    Args:
        model, lora, prompts, reward, rollout, monitor, training: the run's options.
        parallel: how the base is spread over processes; default: not at all.

    Raises:
        ConfigError, AdapterError: if the run could not start with these options.
    """
    check_grpo(training)
    check_combinations(training, rollout, len(build_rewards(reward)))
    if rollout.overlap:
        check_overlap(training, rollout)
    own = (model, lora, prompts, reward, rollout, monitor)
    row_tokens = prompts.max_prompt_length + (training.max_completion_length or 0)
    check_count("max_prompt_length + max_completion_length", row_tokens)
    return describe(model, lora, training, row_tokens, own, parallel)
