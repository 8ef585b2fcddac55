"""The servers' base is held against the trainer's where a run begins, adapter or not."""

import pytest
import torch
from tiny_grpo import Wrapped, make_grpo

from k3tune.lora import adapter_parameters
from k3tune.rl import base_check
from tiny_run import adapted


class Served(Wrapped):
    """Keeps what it was asked to compare."""

    def check_base(self, sequences, expected):
        self.asked = sequences, expected
        return 0.0


@pytest.fixture
def trainer(base_folder, prompts_file, tmp_path):
    trainer = make_grpo(base_folder, prompts_file, tmp_path / "run")
    with torch.no_grad():
        for group in adapter_parameters(trainer.model).values():
            for factor in group.values():
                factor.normal_(std=0.1)
    trainer.engine = Served(trainer.engine)
    return trainer


def test_prompts_of_the_run_are_scored_without_the_adapter(trainer, base_folder, monkeypatch):
    monkeypatch.setattr(base_check, "_MOST_TOKENS", 9)
    base_check.check_served_base(trainer)
    sequences, found = trainer.engine.asked
    prompts = [row["input_ids"] for row in trainer.train_dataset]
    assert [[*first, *rest] for first, rest in sequences] == [row[:9] for row in prompts[:4]]
    untouched = adapted(base_folder)
    with torch.no_grad():
        for (first, rest), scores in zip(sequences, found, strict=True):
            logits = untouched(input_ids=torch.tensor([[*first, *rest]])).logits[0]
            expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(rest)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=2e-5)


def test_the_local_engine_has_no_base_of_its_own(trainer):
    trainer.engine = trainer.engine.engine
    base_check.check_served_base(trainer)


def test_a_run_begins_with_it(trainer):
    trainer.begin()
    assert len(trainer.engine.asked[0]) == 4
