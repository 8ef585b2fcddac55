"""The trainer with an engine: what is pushed, which samples it takes, what a step writes down."""

import json
import math

import pytest
import torch
from tiny_grpo import Wrapped, make_grpo, spread

from k3tune.arguments import MonitorArguments, RolloutArguments
from k3tune.errors import ConfigError, RolloutError
from k3tune.lora import adapter_state
from k3tune.rl import build_engine
from k3tune.rl.guarded import GuardedReward, RewardError
from k3tune.rl.rollout import RolloutEngine
from k3tune.run_log import read_run_log
from tiny_run import adapted

TRAIN_FIELDS = {
    *("loss", "learning_rate", "grad_norm", "entropy", "num_tokens", "tokens", "tokens_per_s"),
    *("reward", "reward_std", "reward/spread", "reward_std/spread", "zero_std_groups"),
    *("completion_tokens", "truncated_fraction", "masked_fraction", "stale_samples"),
    *("importance_truncated_fraction", "bad_rewards", "adapter_version", "unchanged_pushes"),
    *("data_s", "rollout_s", "reward_s", "forward_backward_s", "optimizer_s", "push_s"),
    *("monitor_s", "peak_memory_bytes", "router_load", "router_load/1", "mfu", "epoch"),
    *(f"grad_norm/{group}" for group in ("attention", "latent", "experts", "dense")),
}


def wrapped(base_folder, kind=Wrapped, rollout=None):
    model = adapted(base_folder)
    return model, kind(build_engine(rollout or RolloutArguments(), model, "unused"))


@pytest.fixture(scope="module")
def run(base_folder, prompts_file, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("run")
    model, engine = wrapped(base_folder)
    trainer = make_grpo(
        base_folder, prompts_file, output_dir, model=model, engine=engine, max_steps=3
    )
    trainer.train()
    return trainer, engine, read_run_log(output_dir)


def test_every_documented_field_is_there(run):
    _, _, log = run
    records = log.of_kind("train")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record.keys() >= TRAIN_FIELDS, TRAIN_FIELDS - record.keys()
        assert not [name for name in record if name.startswith(("rewards/", "frac_"))]


def test_every_step_pushes_what_the_optimizer_made(run):
    trainer, engine, log = run
    assert [version for version, _ in engine.pushed] == [1, 2, 3]
    last, state = engine.pushed[-1][1], adapter_state(trainer.model)
    assert last.keys() == state.keys() and all(torch.equal(last[key], state[key]) for key in last)
    assert any(not torch.equal(last[key], engine.pushed[-2][1][key]) for key in last)
    assert [record["adapter_version"] for record in log.of_kind("train")] == [1, 2, 3]
    assert [record["adapter_version"] for record in log.of_kind("mismatch")] == [0, 1, 2]


def test_the_forward_that_trains_agrees_with_the_engine_that_sampled(run):
    """Equal numerics in fp32: what is left is the order of sums in decode and prefill."""
    for record in run[2].of_kind("mismatch"):
        print(f"k3 {record['k3']:.1e}, largest |r| {record['abs_max']:.1e}")
        assert record["k3"] < 1e-9 and record["abs_max"] < 1e-4
        assert record["version_lag"] == 0 if "version_lag" in record else True


def test_the_steps_samples_are_on_the_disk(run):
    trainer, _, _ = run
    files = sorted(path.name for path in (trainer.output_dir / "rollouts").iterdir())
    assert files == ["step-2.0.jsonl", "step-3.0.jsonl"]
    rows = [json.loads(line) for line in (trainer.output_dir / "rollouts" / files[-1]).open()]
    assert len(rows) == 4 and {row["adapter_version"] for row in rows} == {2}
    for row in rows:
        assert len(row["completion_ids"]) == len(row["logprobs"])
        assert row["completion"][0]["role"] == "assistant"
    # two samples of each prompt, each with its own seed
    assert len({row["seed"] for row in rows}) == 4
    assert rows[0]["sample_id"] == rows[1]["sample_id"] != rows[2]["sample_id"]


def test_temperature_is_applied_on_both_sides(base_folder, prompts_file, tmp_path):
    trainer = make_grpo(base_folder, prompts_file, tmp_path, temperature=0.6, max_steps=1)
    trainer.train()
    [record] = read_run_log(tmp_path).of_kind("mismatch")
    assert record["k3"] < 1e-9 and record["num_tokens"] > 0


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_distribution_that_the_trainer_does_not_have_is_refused(
    base_folder, prompts_file, tmp_path, name
):
    value = {"top_k": 5}.get(name, 0.9)
    with pytest.raises(ConfigError, match=f"{name} is {value}, which would not be read"):
        make_grpo(base_folder, prompts_file, tmp_path, **{name: value})


class Late(Wrapped):
    """Says that a push has arrived and samples with the version before."""

    def generate(self, prompts, sampling, seeds):
        rollouts = super().generate(prompts, sampling, seeds)
        late = max(rollouts[0].adapter_version - 1, 0)
        for rollout in rollouts:
            object.__setattr__(rollout, "adapter_version", late)
        return rollouts


def test_a_stale_sample_is_an_error(base_folder, prompts_file, tmp_path):
    model, engine = wrapped(base_folder, Late)
    trainer = make_grpo(base_folder, prompts_file, tmp_path, model=model, engine=engine)
    with pytest.raises(
        RolloutError, match="4 of 4 samples came from adapter version 0, expected 1"
    ):
        trainer.train()


def test_or_is_counted_and_weighed(base_folder, prompts_file, tmp_path):
    rollout = RolloutArguments(on_stale_version="correct")
    model, engine = wrapped(base_folder, Late)
    trainer = make_grpo(
        base_folder, prompts_file, tmp_path, model=model, engine=engine, rollout=rollout
    )
    trainer.train()
    stale = [record["stale_samples"] for record in read_run_log(tmp_path).of_kind("train")]
    assert stale == [0, 4]
    assert isinstance(engine, RolloutEngine)


class NoPush(Wrapped):
    """Loses every push."""

    def load_adapter(self, version, source):
        pass


def test_a_push_that_does_not_arrive_is_an_error(base_folder, prompts_file, tmp_path):
    model, engine = wrapped(base_folder, NoPush)
    trainer = make_grpo(base_folder, prompts_file, tmp_path, model=model, engine=engine)
    with pytest.raises(RolloutError, match="version 1 was pushed and the engine has 0 live"):
        trainer.train()


def frozen_optimizer(trainer):
    """Steps that change nothing."""
    trainer.create_optimizer()
    trainer.optimizer.step = lambda *_, **__: None
    return trainer


def test_a_push_in_which_nothing_changed_is_an_error(base_folder, prompts_file, tmp_path):
    trainer = frozen_optimizer(make_grpo(base_folder, prompts_file, tmp_path, max_steps=3))
    with pytest.raises(RolloutError, match=r"none of the \d+ tensors to push as adapter version 2"):
        trainer.train()


def test_equal_rewards_of_all_samples_move_nothing_and_are_no_error(
    base_folder, prompts_file, tmp_path
):
    def equal(completions, **_):
        return [1.0] * len(completions)

    trainer = make_grpo(base_folder, prompts_file, tmp_path, rewards=[equal], max_steps=3)
    trainer.train()
    log = read_run_log(tmp_path)
    for record in log.of_kind("train"):
        assert record["grad_norm"] == 0 and record["zero_std_groups"] == 1
    assert log.of_kind("train")[-1]["unchanged_pushes"] == 0


@pytest.mark.parametrize(
    "mode", ["token_mask", pytest.param("sequence_mask", marks=pytest.mark.slow)]
)
def test_a_correction_that_masks_everything_leaves_no_gradient(
    base_folder, prompts_file, tmp_path, mode
):
    class Shifted(Wrapped):
        """Claims to have sampled from another distribution."""

        def generate(self, prompts, sampling, seeds):
            rollouts = super().generate(prompts, sampling, seeds)
            for rollout in rollouts:
                shifted = tuple(value - 2.0 for value in rollout.logprobs)
                object.__setattr__(rollout, "logprobs", shifted)
            return rollouts

    model, engine = wrapped(base_folder, Shifted)
    trainer = make_grpo(
        base_folder,
        prompts_file,
        tmp_path,
        model=model,
        engine=engine,
        rollout=RolloutArguments(importance_sampling=mode),
        max_steps=1,
    )
    trainer.train()
    [record] = read_run_log(tmp_path).of_kind("train")
    assert record["masked_fraction"] == 1 and record["grad_norm"] == 0


def test_importance_weights_multiply_the_gradient(base_folder, prompts_file, tmp_path):
    """Rollout logprobs a constant lower: every token weighs e^c as much."""

    class Shifted(Wrapped):
        shift = 0.0

        def generate(self, prompts, sampling, seeds):
            rollouts = super().generate(prompts, sampling, seeds)
            for rollout in rollouts:
                shifted = tuple(value - self.shift for value in rollout.logprobs)
                object.__setattr__(rollout, "logprobs", shifted)
            return rollouts

    norms = []
    for name, shift in (("plain", 0.0), ("heavy", math.log(2))):
        model, engine = wrapped(base_folder, Shifted)
        engine.shift = shift
        trainer = make_grpo(
            base_folder,
            prompts_file,
            tmp_path / name,
            model=model,
            engine=engine,
            max_steps=1,
            max_grad_norm=0.0,
        )
        trainer.train()
        [record] = read_run_log(tmp_path / name).of_kind("train")
        norms.append(record["grad_norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)


def test_a_failing_reward_leaves_the_samples_behind(base_folder, prompts_file, tmp_path):
    def failing(completions, **_):
        raise KeyError("answer")

    trainer = make_grpo(base_folder, prompts_file, tmp_path, rewards=[failing])
    with pytest.raises(RewardError, match="the reward failing raised KeyError") as error:
        trainer.train()
    [file] = (tmp_path / "rollouts").iterdir()
    assert str(file) in str(error.value) and "line, item or row" in str(error.value)
    assert len(file.read_text().splitlines()) == 4


def test_skipped_rewards_are_counted_and_train_nothing(base_folder, prompts_file, tmp_path):
    def first_fails(completion_ids, sample_id, **_):
        if len(completion_ids) > 1 or sample_id[0] % 2:
            raise KeyError("answer")
        return spread(completion_ids)

    reward = GuardedReward(first_fails, "mine", deadline_s=5, skip_bad=True)
    trainer = make_grpo(base_folder, prompts_file, tmp_path, rewards=[reward], max_steps=2)
    trainer.train()
    counts = [record["bad_rewards"] for record in read_run_log(tmp_path).of_kind("train")]
    assert len(counts) == 2 and all(count in (0, 2, 4) for count in counts) and any(counts)


@pytest.mark.slow
def test_beta_holds_the_policy_near_the_base_without_a_second_adapter(
    base_folder, prompts_file, tmp_path
):
    trainer = make_grpo(base_folder, prompts_file, tmp_path, beta=0.1, max_steps=2)
    trainer.train()
    first, second = read_run_log(tmp_path).of_kind("train")
    # the reference is the base: at the first step both are one
    assert abs(first["kl"]) < 1e-9 < second["kl"]
    assert list(trainer.model.peft_config) == ["default"]


@pytest.mark.parametrize("routing", [pytest.param("compare", marks=pytest.mark.slow), "replay"])
def test_the_rollouts_experts_are_compared_or_replayed(
    base_folder, prompts_file, tmp_path, routing
):
    class Rerouted(Wrapped):
        """Claims to have used other experts for every token."""

        def generate(self, prompts, sampling, seeds):
            rollouts = super().generate(prompts, sampling, seeds)
            for rollout in rollouts:
                other = (rollout.routed_experts + 1) % 6
                object.__setattr__(rollout, "routed_experts", other)
            return rollouts

    options = RolloutArguments(routing=routing)
    mismatches = []
    for kind in (Wrapped, Rerouted):
        model, engine = wrapped(base_folder, kind, options)
        folder = tmp_path / kind.__name__
        trainer = make_grpo(
            base_folder,
            prompts_file,
            folder,
            model=model,
            engine=engine,
            rollout=options,
            max_steps=1,
        )
        trainer.train()
        log = read_run_log(folder)
        mismatches.append((log.of_kind("mismatch")[0], log.of_kind("train")[0]))
    (same, train), (other, train_other) = mismatches
    assert same["k3"] < 1e-9
    if routing == "compare":
        assert other["k3"] < 1e-9
    else:
        # the trainer ran with the experts it was given
        assert other["k3"] > 1e-6
        assert train["router_mismatch_used"] == train_other["router_mismatch_used"] == 0
    if "router_mismatch" in same:
        assert same["router_mismatch"] == 0 and other["router_mismatch"] > 0.5


@pytest.mark.slow
def test_an_evaluation_samples_too_and_leaves_the_run_alone(base_folder, prompts_file, tmp_path):
    def curve(folder, **options):
        trainer = make_grpo(base_folder, prompts_file, folder, max_steps=2, **options)
        trainer.train()
        log = read_run_log(folder)
        samples = (folder / "rollouts" / "step-2.0.jsonl").read_text()
        norms = [record["grad_norm"] for record in log.of_kind("train")]
        return samples, norms, log.of_kind("eval")

    samples, norms, none = curve(tmp_path / "without")
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    same_samples, same_norms, records = curve(tmp_path / "with", evaluate=True, **options)
    assert same_samples == samples and not none
    # the order of a batch is drawn anew
    assert same_norms == pytest.approx(norms, rel=1e-5)
    assert [record["step"] for record in records] == [1, 2]
    assert all("eval_reward/spread" in record for record in records)


def test_samples_that_serve_several_steps_are_corrected_by_trls_own_ratio(
    base_folder, prompts_file, tmp_path
):
    trainer = make_grpo(base_folder, prompts_file, tmp_path, num_iterations=2, max_steps=4)
    trainer.train()
    log = read_run_log(tmp_path)
    # two steps a generation: the second trains on samples one version old
    assert [record["version_lag"] for record in log.of_kind("mismatch")] == [0, 1, 0, 1]
    # the old policy is that of the sampling, in both
    assert all(record["k3"] < 1e-9 for record in log.of_kind("mismatch"))


def test_replay_needs_steps_that_are_aligned(base_folder, prompts_file, tmp_path):
    with pytest.raises(ConfigError, match="routing is 'replay' and samples serve 2 batches"):
        make_grpo(
            base_folder,
            prompts_file,
            tmp_path,
            rollout=RolloutArguments(routing="replay"),
            num_iterations=2,
        )


def test_a_step_whose_completions_are_all_cut_can_be_left_out_of_the_loss(
    base_folder, prompts_file, tmp_path
):
    trainer = make_grpo(
        base_folder, prompts_file, tmp_path, mask_truncated_completions=True, max_steps=1
    )
    trainer.train()
    log = read_run_log(tmp_path)
    assert log.of_kind("train")[0]["grad_norm"] == 0
    assert log.of_kind("mismatch")[0]["num_tokens"] == 0 and not log.of_kind("worst")


def test_an_adapter_to_go_on_with_is_pushed_first(base_folder, prompts_file, tmp_path):
    monitor = MonitorArguments(floor_prompts=4, floor_samples=2)
    trainer = make_grpo(
        base_folder,
        prompts_file,
        tmp_path,
        model=adapted(base_folder, live=True),
        monitor=monitor,
        max_steps=1,
    )
    trainer.train()
    [record] = read_run_log(tmp_path).of_kind("mismatch")
    # the floor is the base's, and the adapter keeps it
    assert record["adapter_version"] == 1 and record["verdict"] == "at floor"
    assert record["canary"]["verdict"] == "moved together"
