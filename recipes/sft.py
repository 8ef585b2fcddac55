"""LoRA SFT on a frozen MXFP4 Kimi K3: options -> model and data -> training -> adapter.

    accelerate launch --config_file recipes/accelerate/single.yaml recipes/sft.py \
        --config recipes/configs/nano_sft.yaml

See recipes/README.md for the options, the files a run writes and its exit codes.
"""

import sys

from trl import SFTConfig

from k3tune.arguments import (
    DataArguments,
    LoraArguments,
    ModelArguments,
    ParallelArguments,
    RunArguments,
)
from k3tune.train import (
    K3SFTTrainer,
    build_datasets,
    build_model,
    describe_run,
    load_tokenizer,
    parse_options,
    prepare_launch,
    run_recipe,
)

OPTIONS = (
    ModelArguments,
    LoraArguments,
    DataArguments,
    ParallelArguments,
    RunArguments,
    SFTConfig,
)


def main() -> int:
    """Run the recipe.

    Returns:
        The exit code.
    """
    prepare_launch()
    model_options, lora_options, data_options, parallel, run_options, training = parse_options(
        OPTIONS
    )
    options = (model_options, lora_options, data_options)
    # refuses what cannot run, before anything large is read
    description = describe_run(model_options, lora_options, training, options, parallel)
    if run_options.dry_run:
        print(description)
        return 0

    tokenizer = load_tokenizer(model_options)
    train_dataset, eval_dataset = build_datasets(data_options, tokenizer, training)
    trainer = K3SFTTrainer(
        build_model(model_options, lora_options, training, parallel),
        training,
        train_dataset,
        eval_dataset,
        processing_class=tokenizer,
        options=options,
        free_options=(parallel,),
    )

    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or True)
    if not trainer.terminated:
        trainer.save_model()
    return trainer.exit_code


if __name__ == "__main__":
    sys.exit(run_recipe(main))
