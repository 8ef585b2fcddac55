"""The local engine: samples with the adapter pushed to it, and leaves the model as it was."""

import math

import pytest
import torch

from checkpoints import build_checkpoint
from k3tune.errors import ConfigError, RolloutError
from k3tune.lora import LoraSpec, adapter_parameters, adapter_state, attach_lora, save_adapter
from k3tune.model import load_base
from k3tune.rl import RolloutEngine, Sampling
from k3tune.rl.engines import LocalEngine

GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")
PROMPTS = [[5], [7, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 3, 8]]
SEEDS = [0, 1, 2, 3]
SAMPLING = Sampling(max_new_tokens=10, stop_token_ids=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_checkpoint(
        tmp_path_factory.mktemp("base"), num_hidden_layers=3, num_experts=5, vocab_size=96
    )


@pytest.fixture
def base(folder):
    return load_base(folder, dtype=torch.float32)


@pytest.fixture
def model(base):
    return attach_lora(base, LoraSpec(targets=GROUPS, rank=2, alpha=4))


def shake(model, seed: int = 1) -> None:
    """Change the trained factors, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    for group in adapter_parameters(model).values():
        for factor in group.values():
            factor.data.normal_(std=0.2, generator=generator)


def tokens(engine, **options):
    return [r.completion_ids for r in engine.generate(PROMPTS, SAMPLING, SEEDS, **options)]


def k3(engine, rollouts, scores=None) -> float:
    scores = scores or engine.score([(r.prompt_ids, r.completion_ids) for r in rollouts])
    differences = [
        scored - logprob
        for rollout, row in zip(rollouts, scores, strict=True)
        for scored, logprob in zip(row, rollout.logprobs, strict=True)
    ]
    return sum(math.expm1(r) - r for r in differences) / len(differences)


def test_it_is_a_rollout_engine(model):
    assert isinstance(LocalEngine(model), RolloutEngine)


def test_rollouts_carry_what_was_asked_for_in_order(model):
    engine = LocalEngine(model, max_batch_size=3, return_routing=True)
    rollouts = engine.generate(PROMPTS, SAMPLING, SEEDS)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        assert rollout.prompt_ids == tuple(prompt) and len(rollout.completion_ids) == 10
        assert (rollout.finish_reason, rollout.adapter_version) == ("length", 0)
        # two MoE layers, two experts a token; the last token predicts nothing
        assert rollout.routed_experts.shape == (len(prompt) + 9, 2, 2)
    assert LocalEngine(model).generate(PROMPTS, SAMPLING, SEEDS)[0].routed_experts is None
    assert engine.generate([], SAMPLING, []) == [] and engine.score([]) == []


def test_version_zero_is_the_base_whatever_the_adapter_holds(model, base):
    shake(model)
    engine = LocalEngine(model)
    with model.disable_adapter():
        expected = tokens(LocalEngine(base))
    assert tokens(engine) == expected
    assert engine.health().adapter_version == 0


@pytest.mark.parametrize("max_batch_size", [2, 64])
def test_scores_are_the_logprobs_of_the_samples(model, max_batch_size):
    shake(model)
    engine = LocalEngine(model, max_batch_size=max_batch_size)
    engine.load_adapter(1, adapter_state(model))
    rollouts = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert {rollout.adapter_version for rollout in rollouts} == {1}
    assert k3(engine, rollouts) < 1e-9


def test_a_stale_adapter_stays_until_the_next_push(model):
    engine = LocalEngine(model)
    shake(model, seed=1)
    engine.load_adapter(1, adapter_state(model))
    first = engine.generate(PROMPTS, SAMPLING, SEEDS)
    scores = engine.score([(r.prompt_ids, r.completion_ids) for r in first])
    shake(model, seed=2)
    assert engine.generate(PROMPTS, SAMPLING, SEEDS) == first
    assert engine.score([(r.prompt_ids, r.completion_ids) for r in first]) == scores
    engine.load_adapter(2, adapter_state(model))
    assert tokens(engine) != [r.completion_ids for r in first]
    assert k3(engine, first) > 1e-3


def test_a_push_from_a_directory_is_a_push_of_the_tensors(model, tmp_path):
    shake(model)
    save_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    by_path, by_tensors = LocalEngine(model), LocalEngine(model)
    by_path.load_adapter(4, tmp_path / "adapter")
    by_tensors.load_adapter(4, adapter_state(model))
    assert by_path.last_push == by_tensors.last_push
    assert tokens(by_path) == tokens(by_tensors)


def test_the_last_push_says_how_many_tensors_changed(model):
    engine = LocalEngine(model)
    assert engine.last_push is None
    engine.load_adapter(1, adapter_state(model))
    assert engine.last_push.num_changed == 0
    state = adapter_state(model)
    state[next(key for key in state if "lora_B" in key)] += 0.5
    engine.load_adapter(2, state)
    assert engine.last_push == (len(state), 1)


def test_factors_are_rounded_to_bfloat16_when_asked(model):
    shake(model)
    state = adapter_state(model)
    rounded = {key: value.bfloat16().float() for key, value in state.items()}
    engines = [LocalEngine(model, adapter_dtype=dtype) for dtype in ("bfloat16", None, None)]
    for engine, tensors in zip(engines, (state, rounded, state), strict=True):
        engine.load_adapter(1, tensors)
    first, second, exact = (e.generate(PROMPTS, SAMPLING, SEEDS) for e in engines)
    assert first == second and first != exact


def test_the_trained_factors_and_their_gradients_are_untouched(model):
    shake(model)
    engine = LocalEngine(model)
    engine.load_adapter(1, adapter_state(model))
    shake(model, seed=2)
    parameters = dict(model.named_parameters())
    pointers = {name: p.data_ptr() for name, p in parameters.items()}
    needs = {name: p.requires_grad for name, p in parameters.items()}
    before = adapter_state(model)
    model.train()
    loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.score([([1], [2, 3])])
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert {name: p.requires_grad for name, p in model.named_parameters()} == needs
    after = adapter_state(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert gradients and all(torch.equal(parameters[n].grad, g) for n, g in gradients.items())
    assert list(model.peft_config) == ["default"] and torch.is_grad_enabled()


def test_training_mode_is_restored_module_by_module(model):
    model.train()
    frozen = model.get_base_model().model.layers[1]
    frozen.eval()
    before = {name: module.training for name, module in model.named_modules()}
    engine = LocalEngine(model)
    engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert {name: module.training for name, module in model.named_modules()} == before
    with pytest.raises(RolloutError):
        engine.generate([[1000]], SAMPLING, [0])
    engine.score([([1], [2])])
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_failure_while_sampling_restores_the_model_too(model, monkeypatch):
    shake(model)
    engine, state = LocalEngine(model), adapter_state(model)
    model.train()

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(model.get_base_model().model), "decode", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(adapter_state(model)[key], value) for key, value in state.items())


def test_disabled_adapters_are_applied_by_the_engine_and_stay_disabled(model):
    shake(model)
    engine = LocalEngine(model)
    engine.load_adapter(1, adapter_state(model))
    expected, ids = tokens(engine), torch.tensor([PROMPTS[2]])
    with model.disable_adapter():
        disabled = model(ids).logits
        assert tokens(engine) == expected
        assert torch.equal(model(ids).logits, disabled)
    assert not torch.equal(model(ids).logits, disabled)


def test_torchs_generators_and_autocast_are_left_alone(model):
    engine = LocalEngine(model)
    state = torch.get_rng_state()
    expected = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.generate(PROMPTS, SAMPLING, SEEDS) == expected
        assert torch.is_autocast_enabled("cpu")


def test_a_bare_model_is_sampled_and_takes_no_adapter(base):
    engine = LocalEngine(base)
    rollouts = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert k3(engine, rollouts) < 1e-9
    with pytest.raises(RolloutError, match="has no adapter to replace: attach one"):
        engine.load_adapter(1, {})


def test_health_names_everything_the_floor_depends_on(model):
    plain = LocalEngine(model).health().numerics
    assert plain["engine"] == "local" and plain["dtype"] == "float32"
    for options in ({"activations": "mxfp8"}, {"adapter_dtype": "bfloat16"}):
        other = LocalEngine(model, **options).health().numerics
        assert other != plain and other.keys() == plain.keys()


def change_key(state):
    state["other"] = state.pop(next(iter(state)))


def change_shape(state):
    key = next(iter(state))
    state[key] = state[key][:1]


def change_value(state):
    state[next(iter(state))].view(-1)[0] = math.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_key, r"1 are missing \(base_model.+\) and 1 unknown \(other\)"),
        (change_shape, r"is \[1, \d+\], expected \[2, \d+\] as the adapter"),
        (change_value, "not finite: training diverged"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_and_the_live_adapter_stays(model, change, message):
    shake(model)
    engine = LocalEngine(model)
    engine.load_adapter(3, adapter_state(model))
    expected = engine.generate(PROMPTS, SAMPLING, SEEDS)
    shake(model, seed=2)
    state = adapter_state(model)
    change(state)
    with pytest.raises(RolloutError, match=message):
        engine.load_adapter(4, state)
    assert engine.generate(PROMPTS, SAMPLING, SEEDS) == expected


@pytest.mark.parametrize("version", [0, 2, 3])
def test_versions_only_grow(model, version):
    engine = LocalEngine(model)
    engine.load_adapter(3, adapter_state(model))
    with pytest.raises(RolloutError, match=f"version {version} was pushed and 3 is live"):
        engine.load_adapter(version, adapter_state(model))


def test_a_directory_with_another_scale_is_refused(model, folder, tmp_path):
    other = attach_lora(load_base(folder), LoraSpec(targets=GROUPS, rank=2, alpha=8))
    save_adapter(other, tmp_path / "adapter")
    with pytest.raises(RolloutError, match=r"has rank and alpha \(2, 8\).+expected \(2, 4\)"):
        LocalEngine(model).load_adapter(1, tmp_path / "adapter")
    fewer = attach_lora(load_base(folder), LoraSpec(targets=("attention",), rank=2, alpha=4))
    save_adapter(fewer, tmp_path / "fewer")
    with pytest.raises(RolloutError, match="expected the same ones"):
        LocalEngine(model).load_adapter(1, tmp_path / "fewer")
    with pytest.raises(RolloutError, match="is no directory, expected an adapter"):
        LocalEngine(model).load_adapter(1, tmp_path / "nothing")


def test_bad_calls_are_refused(model):
    engine = LocalEngine(model)
    with pytest.raises(RolloutError, match="1 prompts came with 2 seeds"):
        engine.generate([[1]], SAMPLING, [1, 2])
    with pytest.raises(RolloutError, match="prompt 1 is empty"):
        engine.generate([[1], []], SAMPLING, [1, 2])
    with pytest.raises(RolloutError, match="sequence 1 has 1 prompt and 0 completion ids"):
        engine.score([([1], [2]), ([1], [])])
    with pytest.raises(RolloutError, match="sequence 0 holds ids from 1 to 96, expected ids of"):
        engine.score([([1], [96])])
    with pytest.raises(ConfigError, match="activations is 'fp8', expected one of none, bf16, mxf"):
        LocalEngine(model, activations="fp8")
    with pytest.raises(RolloutError, match="adapter_dtype is 'fp8', expected None or 'bfloat16'"):
        LocalEngine(model, adapter_dtype="fp8")
    with pytest.raises(RolloutError, match="max_batch_size is 0"):
        LocalEngine(model, max_batch_size=0)


def test_a_closed_engine_says_so(model):
    engine = LocalEngine(model)
    engine.close()
    engine.close()
    for call in (engine.health, lambda: tokens(engine), lambda: engine.score([([1], [2])])):
        with pytest.raises(RolloutError, match="the engine is closed"):
            call()


class Processes:
    """Stands for an all-reduce: this process steps until the longest of the others is done."""

    def __init__(self, forwards_of_others: int) -> None:
        self.left, self.calls = forwards_of_others, []

    def __call__(self, has_work: bool) -> bool:
        self.calls.append(has_work)
        self.left -= 1
        return has_work or self.left >= 0


@pytest.mark.parametrize("others", [0, 5, 30])
def test_a_process_that_is_done_runs_along_with_the_others(model, others, monkeypatch):
    forwards = 0
    backbone = type(model.get_base_model().model)
    run_layers = backbone._decode

    def counted(*args, **options):
        nonlocal forwards
        forwards += 1
        return run_layers(*args, **options)

    monkeypatch.setattr(backbone, "_decode", counted)
    processes = Processes(others)
    engine = LocalEngine(model, keep_stepping=processes)
    assert tokens(engine) == tokens(LocalEngine(model))
    # one prefill, nine decodes; one call more to hear that all are done
    own = 10
    forwards -= own
    assert forwards == max(own, others) and len(processes.calls) == forwards + 1
    assert processes.calls[:own] == [True] * own and not any(processes.calls[own:])
