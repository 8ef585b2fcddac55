"""An adapter that does not train fails the run at its second step, and says which factor."""

import pytest
import torch

from k3tune.errors import AdapterError
from k3tune.lora import adapter_parameters, attach_lora, load_adapter, save_adapter
from k3tune.lora.watch import FactorWatch
from k3tune.model import load_base


def factors(model):
    return {n: f for group in adapter_parameters(model).values() for n, f in group.items()}


def train(model, watch, batches, *, skip=(), rates=None):
    """Steps of AdamW, one a batch; the last report."""
    trained = [factor for name, factor in factors(model).items() if name not in skip]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    report = None
    for batch, rate in zip(batches, rates or [1e-3] * len(batches), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        report = watch.after_step(rate)
        model.zero_grad()
    return report


@pytest.mark.parametrize("form", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_that_trains_passes(base, spec, ids, form, checkpointing):
    model = attach_lora(base, spec(form=form))
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
    watch = FactorWatch(model)
    report = train(model, watch, [ids, ids])
    # 26 tokens to two of five experts each: all of them
    per_layer = {"per_expert": 30, "shared_outer": 18}[form]
    assert report == watch.report
    assert (report.factors, report.untouched_experts) == (2 * 29 + 2 * per_layer, 0)


def test_the_start_may_be_a_loaded_adapter(folder, base, spec, ids, randomise, tmp_path):
    path = save_adapter(randomise(attach_lora(base, spec())), tmp_path / "adapter")
    model = load_adapter(load_base(folder, dtype=torch.float32), path, trainable=True)
    assert train(model, FactorWatch(model), [ids, ids]).factors == 118


def test_steps_at_rate_zero_do_not_count(base, spec, ids):
    model = attach_lora(base, spec(targets=["latent"]))
    watch = FactorWatch(model)
    assert train(model, watch, [ids] * 3, rates=[0.0, 0.0, 1e-3]) is None
    assert train(model, watch, [ids]).factors == 8


def test_experts_without_tokens_are_counted_not_failed(base, spec, ids):
    model = attach_lora(base, spec(targets=["experts"]))
    # one target a step: only the first token of each row takes part in the loss of the last layer
    batch = ids[:1, :2]
    report = train(model, FactorWatch(model), [batch, batch])
    assert report.untouched_experts > 0 and report.factors > 0


def test_an_expert_first_seen_at_the_second_step_passes(base, spec, ids):
    model = attach_lora(base, spec(targets=["experts"]))
    few, many = ids[:1, :2], ids
    # dA of a newly seen expert is still zero: its B was zero
    assert train(model, FactorWatch(model), [few, many]).untouched_experts == 0


def test_a_factor_missing_from_the_optimizer_is_named(base, spec, ids):
    model = attach_lora(base, spec())
    left_out = "model.layers.1.block_sparse_moe.experts.w3.lora_B"
    with pytest.raises(AdapterError, match=r"experts.w3.lora_B of expert 0 \(unchanged\)"):
        train(model, FactorWatch(model), [ids, ids], skip={left_out})


def test_a_factor_without_gradient_is_named(base, spec, ids):
    model = attach_lora(base, spec())
    base.model.layers[2].self_attn.o_proj.register_forward_hook(lambda *args: args[-1].detach())
    with pytest.raises(
        AdapterError, match=r"after 2 .* 12 factors .*layers.2.self_attn.q_a_proj.lora_A"
    ):
        train(model, FactorWatch(model), [ids, ids])


def test_hooks_are_gone_after_the_check(base, spec, ids):
    model = attach_lora(base, spec())
    watch = FactorWatch(model)
    train(model, watch, [ids, ids])
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert not any(hooks)
    # a later step costs nothing and says the same
    assert watch.after_step(1e-3) is watch.report


def test_an_adapter_that_is_not_trainable_cannot_be_watched(folder, base, spec, tmp_path):
    path = save_adapter(attach_lora(base, spec()), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="no factor of adapter 'default' is trainable"):
        FactorWatch(load_adapter(load_base(folder), path))
