"""What a run writes down: one record a logging step, the same names for trackers, its config."""

import math

import pytest
import torch
import yaml
from transformers import TrainerCallback, trainer

from k3tune.data import pack
from k3tune.run_log import read_run_log
from k3tune.train import trainer as k3_trainer
from k3tune.train.metrics import RouterLoad, StepClock
from tiny_run import adapted, make_trainer, rows

TRAIN_FIELDS = {
    "loss",
    "learning_rate",
    "grad_norm",
    "grad_norm/attention",
    "grad_norm/latent",
    "grad_norm/experts",
    "grad_norm/shared_experts",
    "grad_norm/dense",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "tokens",
    "trained_tokens",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "router_load",
    "router_load/1",
    "data_s",
    "forward_backward_s",
    "optimizer_s",
    "epoch",
}


class Tracker(TrainerCallback):
    """Gets what TensorBoard, W&B or Trackio would get."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def run(base_folder, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("run")
    tracker = Tracker()
    trainer = make_trainer(
        base_folder,
        output_dir,
        eval_dataset=rows((5, 9)),
        eval_strategy="steps",
        eval_steps=2,
        max_steps=4,
        callbacks=[tracker],
        max_grad_norm=0.5,
    )
    trainer.train()
    return trainer, tracker, read_run_log(output_dir)


def test_every_documented_field_is_there(run):
    _, _, log = run
    records = log.of_kind("train")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record.keys() == TRAIN_FIELDS | {"schema", "kind", "time", "step"}
    assert [record["kind"] for record in log.records] == [
        *("run", "train", "train", "eval", "train", "train", "eval", "end")
    ]
    assert log.of_kind("end")[0]["reason"] == "finished"


def test_trackers_get_the_same_names_and_values(run):
    _, tracker, log = run
    own = {"schema", "kind", "time", "step"}
    for logs, record in zip(tracker.logs, log.records[1:], strict=True):
        # the Trainer's printer takes total_flos away; a peak that is not known is null in the file,
        # and nothing trackers could draw
        logs.pop("total_flos", None)
        assert logs.keys() == record.keys() - own - {"mfu", "reason", "total_flos"}
        assert all(record[name] == value for name, value in logs.items())


def test_tokens_are_counted(run):
    _, _, log = run
    records = log.of_kind("train")
    lengths, trained = 72, 72 - 8 * 2
    assert records[0]["tokens"] + records[1]["tokens"] == lengths
    assert records[0]["trained_tokens"] + records[1]["trained_tokens"] == trained
    assert records[-1]["num_tokens"] == 2 * lengths
    for record in records:
        seconds = record["data_s"] + record["forward_backward_s"] + record["optimizer_s"]
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / seconds)


def test_the_groups_norms_make_the_norm_before_clipping(run):
    _, _, log = run
    for record in log.of_kind("train"):
        squares = [record[n] ** 2 for n in TRAIN_FIELDS if n.startswith("grad_norm/")]
        assert math.sqrt(sum(squares)) == pytest.approx(record["grad_norm"], rel=1e-5)
        assert record["grad_norm"] > 0.5


def test_the_config_is_written_and_reads_back(run):
    trainer, _, log = run
    file = f"{trainer.args.output_dir}/config.yaml"
    with open(file, encoding="utf-8") as stream:
        text = stream.read()
    assert "# torch: " in text and "# git commit: " in text
    written = yaml.safe_load(text)
    assert written["learning_rate"] == trainer.args.learning_rate
    assert written == trainer.config.options
    assert log.of_kind("run")[0]["config_sha256"] == trainer.config.sha256


def routing_counts(model, batches, layer=1):
    """Tokens by expert, from the model's own answer, one sample at a time."""
    counts = torch.zeros(model.get_base_model().model.architecture.num_experts)
    for row in batches:
        routing = model(input_ids=torch.tensor([row]), output_routing=True).routing[layer]
        counts += torch.bincount(routing.expert_ids.flatten(), minlength=len(counts))
    return counts


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_router_load_counts_each_real_token_once(base_folder, tmp_path, packing, recompute):
    dataset = pack(rows(), 32, seed=0).rows if packing else rows()
    model = adapted(base_folder)
    counts = routing_counts(model, rows()["input_ids"])
    trainer = make_trainer(
        base_folder,
        tmp_path,
        dataset,
        model=model,
        max_steps=1,
        packing=packing,
        per_device_train_batch_size=8,
        activation_checkpointing=recompute,
    )
    trainer.train()
    [record] = read_run_log(tmp_path).of_kind("train")
    assert record["router_load/1"] == pytest.approx((counts.max() / counts.mean()).item())


def test_router_load_ignores_evaluation_and_can_be_taken_off(base_folder):
    backbone = adapted(base_folder).get_base_model().model
    load = RouterLoad(backbone)
    ids = torch.tensor([[1, 2, 3]])
    backbone.eval()
    assert backbone(ids).routing is None and load.take() == {}
    backbone.train()
    backbone(ids)
    assert load.take().keys() == {1} and load.take() == {}
    load.remove()
    assert backbone(ids).routing is None


def test_the_clock_gives_each_phase_its_own_time():
    clock = StepClock(torch.device("cpu"))
    with clock.phase("data"):
        pass
    clock.start("forward_backward")
    clock.start("optimizer")
    clock.end_step()
    seconds, steps = clock.take()
    assert steps == 1 and all(value > 0 for value in seconds.values())
    assert clock.take() == (dict.fromkeys(seconds, 0.0), 0)


@pytest.mark.parametrize("installed", [False, True])
def test_tensorboard_is_on_where_it_is_installed(
    base_folder, tmp_path, monkeypatch, caplog, installed
):
    monkeypatch.setattr(k3_trainer, "is_tensorboard_available", lambda: installed)
    monkeypatch.setattr(trainer, "get_reporting_integration_callbacks", lambda names: [])
    run = make_trainer(base_folder, tmp_path, report_to="tensorboard")
    assert run.args.report_to == (["tensorboard"] if installed else [])
    assert ("tensorboard, which is not installed" in caplog.text) is not installed
