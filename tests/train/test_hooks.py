"""The private names of other libraries that training overrides or reads, for their versions.

A failure here after an update says what to look at again before the version caps are raised.
"""

import inspect
from importlib.metadata import version

import pytest
from transformers import Trainer
from trl import SFTTrainer
from trl.trainer import sft_trainer

from k3tune.train import K3SFTTrainer
from k3tune.train.resumable import ResumableTrainer
from k3tune.train.trainer import K3Trainer

PRIVATE_OVERRIDES = {
    "_send_telemetry": [],
    "_save_checkpoint": ["model", "trial"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "_load_best_model": [],
}


def test_the_versions_are_those_the_hooks_were_written_against():
    assert version("transformers").startswith("5.24.")
    assert version("trl").startswith("1.16.")
    assert version("deepspeed").startswith("0.19.")


@pytest.mark.parametrize("name", PRIVATE_OVERRIDES)
def test_each_private_hook_still_has_its_parameters(name):
    parameters = list(inspect.signature(getattr(SFTTrainer, name)).parameters)
    assert parameters == ["self", *PRIVATE_OVERRIDES[name]]
    assert list(inspect.signature(getattr(K3SFTTrainer, name)).parameters) == parameters


def test_no_other_private_method_is_overridden():
    inherited = set(dir(SFTTrainer))
    ours = {name for kind in (ResumableTrainer, K3Trainer, K3SFTTrainer) for name in vars(kind)}
    private = {name for name in ours & inherited if name[0] == "_" and name[1] != "_"}
    assert private == set(PRIVATE_OVERRIDES)


def test_the_trainer_still_calls_the_hooks_where_training_counts_on_them():
    train, prepare = inspect.getsource(Trainer.train), inspect.getsource(Trainer._run_epoch)
    assert "self._load_from_checkpoint(resume_from_checkpoint)" in train
    assert prepare.count("self._load_rng_state(resume_from_checkpoint)") == 2
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)" in loop
    assert "self._save_checkpoint(model, trial)" in inspect.getsource(
        Trainer._maybe_log_save_evaluate
    )


def test_trl_still_weighs_tokens_by_the_count_it_is_given():
    source = inspect.getsource(SFTTrainer.compute_loss)
    assert "per_token_loss.sum() / torch.as_tensor(num_tokens)" in source
    assert "self._total_train_tokens +=" in source
    assert "seq_lengths" in inspect.getsource(sft_trainer.DataCollatorForLanguageModeling)
