"""The SFT trainer on one global batch of four rows a step, alone or expert parallel."""

import shutil
from pathlib import Path

from trl import SFTConfig

from k3tune.arguments import LoraArguments, ModelArguments, ParallelArguments
from k3tune.data import K3Tokenizer
from k3tune.train import K3SFTTrainer, build_model
from tiny_run import COMMON, GROUPS, rows

ROWS_PER_STEP = 4


def make_trainer(
    folder: Path,
    run: str,
    size: int,
    world: int,
    rank: int = 2,
    form: str = "shared_outer",
    **options,
):
    """A trainer on the base in ``sft_base``, which writes to the folder's ``sft_<run>``."""
    base, output_dir = str(folder / "sft_base"), str(folder / f"sft_{run}")
    steps = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    batch = {"per_device_train_batch_size": ROWS_PER_STEP // world}
    training = SFTConfig(output_dir, **{**COMMON, **steps, **batch, **options})
    lora = LoraArguments(lora_targets=list(GROUPS), lora_rank=rank, lora_alpha=4.0, lora_form=form)
    parallel = ParallelArguments(expert_parallel_size=size)
    return K3SFTTrainer(
        build_model(ModelArguments(base, dtype="float32"), lora, training, parallel),
        training,
        rows(),
        processing_class=K3Tokenizer.from_pretrained(base),
        options=(lora,) if rank == 2 else (),
        free_options=(parallel,),
    )


def train(folder: Path, run: str, size: int, world: int, **options) -> K3SFTTrainer:
    """Train to the end, going on from the newest checkpoint that is there."""
    trainer = make_trainer(folder, run, size, world, **options)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    return trainer


def begin(folder: Path, run: str, other: str) -> None:
    """Give a run the checkpoint after two of the other's five steps."""
    target = folder / f"sft_{run}" / "checkpoint-2"
    shutil.copytree(folder / f"sft_{other}" / "checkpoint-2", target)
