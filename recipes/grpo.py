"""GRPO of an adapter on a frozen MXFP4 Kimi K3: options -> model, engine, data -> adapter.

    accelerate launch --config_file recipes/accelerate/single.yaml recipes/grpo.py \
        --config recipes/configs/nano_grpo.yaml

See recipes/README.md for the options, the files a run writes and its exit codes.
"""

import sys
from contextlib import closing

from trl import GRPOConfig

from k3tune.arguments import (
    LoraArguments,
    ModelArguments,
    MonitorArguments,
    ParallelArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
    RunArguments,
)
from k3tune.rl import build_engine, build_prompts, build_rewards, describe_grpo, trainer_class
from k3tune.train import build_model, load_tokenizer, parse_options, prepare_launch, run_recipe

OPTIONS = (
    ModelArguments,
    LoraArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
    MonitorArguments,
    ParallelArguments,
    RunArguments,
    GRPOConfig,
)


def main() -> int:
    """Run the recipe.

    Returns:
        The exit code.
    """
    prepare_launch()
    model_options, lora, prompts, reward, rollout, monitor, parallel, run, training = parse_options(
        OPTIONS
    )
    # refuses what cannot run, before anything large is read
    options = (model_options, lora, prompts, reward, rollout, monitor, training)
    description = describe_grpo(*options, parallel)
    if run.dry_run:
        print(description)
        return 0

    tokenizer = load_tokenizer(model_options)
    rewards = build_rewards(reward)
    train_dataset, eval_dataset = build_prompts(prompts, tokenizer)
    model = build_model(model_options, lora, training, parallel)
    with closing(build_engine(rollout, model, training.output_dir)) as engine:
        trainer = trainer_class(rollout)(
            model,
            training,
            train_dataset,
            eval_dataset,
            engine=engine,
            rewards=rewards,
            processing_class=tokenizer,
            rollout=rollout,
            monitor=monitor,
            thinking=prompts.thinking,
            options=(model_options, lora, prompts, reward),
            free_options=(parallel,),
        )
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or True)
        if not trainer.terminated:
            trainer.save_model()
        return trainer.exit_code


if __name__ == "__main__":
    sys.exit(run_recipe(main))
