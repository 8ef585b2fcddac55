"""Every trained token of a step weighs the same, whatever rows and batches it came in."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from closeness import relative_l2
from k3tune.data import pack
from k3tune.lora import adapter_state
from k3tune.train.errors import TrainingError
from tiny_run import adapted, make_trainer, rows

# A step of plain gradient descent moves every factor by its gradient.
ONE_DESCENT = {
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": 1.0,
    "max_grad_norm": 1e9,
    "train_sampling_strategy": "sequential",
}


def loss_and_gradients(base_folder, folder, dataset, **options):
    model = adapted(base_folder, live=True)
    before = adapter_state(model)
    trainer = make_trainer(base_folder, folder, dataset, model=model, **ONE_DESCENT, **options)
    loss = trainer.train().training_loss
    after = adapter_state(model)
    return loss, torch.cat([(before[key] - after[key]).flatten() for key in before])


@torch.no_grad()
def mean_loss(model, dataset) -> float:
    """Over all trained tokens, each sample run alone through the model's own loss."""
    total, count = 0.0, 0
    for sample in dataset:
        labels = torch.tensor([sample["labels"]])
        trained = int((labels[:, 1:] != -100).sum())
        total += model(input_ids=torch.tensor([sample["input_ids"]]), labels=labels).loss * trained
        count += trained
    return float(total) / count


def test_eight_batches_of_one_equal_one_batch_of_eight(base_folder, tmp_path):
    expected_loss = mean_loss(adapted(base_folder, live=True), rows())
    loss_1, gradients_1 = loss_and_gradients(
        base_folder, tmp_path / "1", rows(), per_device_train_batch_size=8
    )
    loss_8, gradients_8 = loss_and_gradients(
        base_folder,
        tmp_path / "8",
        rows(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
    )
    assert loss_1 == pytest.approx(expected_loss, rel=1e-5)
    assert loss_8 == pytest.approx(loss_1, rel=1e-5)
    assert relative_l2(gradients_8, gradients_1) < 1e-5


def test_packed_rows_equal_the_samples_in_loss_and_gradients(base_folder, tmp_path):
    packed = pack(rows(), 32, seed=0).rows
    assert len(packed) < len(rows()) / 2
    loss, gradients = loss_and_gradients(
        base_folder, tmp_path / "packed", packed, per_device_train_batch_size=8, packing=True
    )
    expected_loss, expected = loss_and_gradients(
        base_folder, tmp_path / "single", rows(), per_device_train_batch_size=8
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_l2(gradients, expected) < 1e-5


def test_activation_checkpointing_changes_nothing(base_folder, tmp_path):
    loss, gradients = loss_and_gradients(base_folder, tmp_path / "plain", rows())
    recomputed_loss, recomputed = loss_and_gradients(
        base_folder, tmp_path / "recomputed", rows(), activation_checkpointing=True
    )
    assert recomputed_loss == pytest.approx(loss, rel=1e-6)
    assert relative_l2(recomputed, gradients) < 1e-6


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_weighs_tokens_not_batches(base_folder, tmp_path, batch_size):
    model = adapted(base_folder, live=True)
    expected = mean_loss(model, rows())
    trainer = make_trainer(
        base_folder,
        tmp_path,
        model=model,
        eval_dataset=rows(),
        per_device_eval_batch_size=batch_size,
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_trained_tokens_is_refused_with_its_samples(base_folder, tmp_path):
    masked = [*range(3, 7)]
    dataset = Dataset.from_list(
        [
            {**row, "labels": [-100] * len(row["labels"])} if number in masked else row
            for number, row in enumerate(rows())
        ]
    )
    trainer = make_trainer(
        base_folder,
        tmp_path,
        dataset,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        train_sampling_strategy="sequential",
    )
    with pytest.raises(TrainingError, match=r"step 1: expected a trained token .* of samples 4 "):
        trainer.train()


class Poison(TrainerCallback):
    """Spoils the adapter after the first step."""

    def on_step_end(self, args, state, control, model=None, **_):
        next(p for n, p in model.named_parameters() if "lora_B" in n).data.fill_(float("nan"))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(
    base_folder, tmp_path, packing
):
    dataset = pack(rows(), 32, seed=0).rows if packing else rows()
    trainer = make_trainer(
        base_folder,
        tmp_path,
        dataset,
        callbacks=[Poison()],
        packing=packing,
        per_device_train_batch_size=8,
        max_steps=3,
    )
    with pytest.raises(TrainingError, match="step 2: the loss is nan, ") as error:
        trainer.train()
    named = str(error.value).split("of samples ")[1].split(" (lines")[0]
    assert sorted(map(int, named.split(", "))) == list(range(1, 9))
