"""The private names of TRL that GRPO overrides or reads, for the version they were written against.

A failure here after an update says what to look at again before the version cap is raised.
"""

import inspect
from importlib.metadata import version

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from k3tune.rl import K3GRPOTrainer
from k3tune.rl.hooks import EpochSampler, HookedGRPOTrainer
from k3tune.train.resumable import ResumableTrainer
from k3tune.train.trainer import K3Trainer

PRIVATE_OVERRIDES = {
    "_get_train_sampler": ["dataset"],
    "_generate_and_score_completions": ["inputs"],
    "_tokenize_prompts": ["prompts"],
    "_generate_single_turn": [
        *("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ],
    "_generate": ["prompts"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_get_per_token_logps_and_entropies": None,
    "_compute_loss": ["model", "inputs"],
}


def test_the_version_is_the_one_the_hooks_were_written_against():
    assert version("trl").startswith("1.16.")


@pytest.mark.parametrize("name", PRIVATE_OVERRIDES)
def test_each_private_hook_still_has_its_parameters(name):
    theirs = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)[1:]
    ours = list(inspect.signature(getattr(HookedGRPOTrainer, name)).parameters)[1:]
    expected = PRIVATE_OVERRIDES[name]
    if expected is None:
        assert theirs[:6] == [
            *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
            "compute_entropy",
        ]
    else:
        assert theirs == ours == expected


def test_all_private_overrides_are_in_one_file():
    inherited = set(dir(GRPOTrainer))

    def private(kind):
        return {name for name in vars(kind) if name in inherited and name[0] == "_" != name[1]}

    assert private(HookedGRPOTrainer) == set(PRIVATE_OVERRIDES)
    assert not private(K3GRPOTrainer) and not private(K3Trainer)
    # those of transformers are in the file that resuming has for them
    assert not private(ResumableTrainer) & set(PRIVATE_OVERRIDES)


def test_trl_still_does_what_the_hooks_count_on():
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    # advantages of a value a token, and no old logprobs where steps are aligned
    assert "if advantages.dim() == 1:" in loss
    assert 'old_per_token_logps = inputs.get("old_per_token_logps")' in loss
    assert "per_token_logps.detach() if old_per_token_logps is None" in loss
    assert loss.count("self._get_per_token_logps_and_entropies(") == 1
    scoring = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "self.args.gradient_accumulation_steps % generate_every != 0" in scoring
    assert 'output["sampling_per_token_logps"]' in scoring
    assert "self._calculate_rewards(inputs, prompts, completions" in scoring
    prepare = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in prepare
    assert "outputs.log_probs" in inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "def add_fused_lm_head" in inspect.getsource(
        inspect.getmodule(grpo_trainer.add_fused_lm_head)
    )


def test_an_epochs_order_depends_on_seed_and_epoch_alone():
    def order(epoch, seed=0, before=0):
        sampler = EpochSampler(RepeatSampler(range(10), 2, 5, 1, seed=seed), seed)
        for _ in range(before):
            list(sampler)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(3) == order(3, before=2)
    assert order(3) != order(4) and order(3) != order(3, seed=1)
    assert sorted(order(0)) == sorted(list(range(10)) * 2)
    assert len(EpochSampler(RepeatSampler(range(10), 2, 5), 0)) == 20


def test_an_unshuffled_sampler_keeps_its_order():
    sampler = EpochSampler(RepeatSampler(range(4), 1, 2, shuffle=False), 0)
    assert list(sampler) == [0, 1, 2, 3]
    assert torch.initial_seed() == 0
