"""Mutants of a sharded trunk: wrong mechanisms that look alike, each of which must be noticed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trunk_run import gradients, loss_of, same

from k3tune.parallel import trunk as trunk_module
from k3tune.parallel.trunk import TrunkShards
from k3tune.parallel.trunk_loading import sharded_trunk
from k3tune.parallel.trunk_unit import TrunkError, Unit


def a_recompute_without_gather_fails(run):
    """Without the gather in what transformers checkpoints, the recompute finds no weights."""
    model = run.model(True)
    hook, trunk_module._gather_in_recompute = trunk_module._gather_in_recompute, lambda *_: None
    try:
        loss = loss_of(model, run.ids(1))
        gradients(model, loss)
        raise AssertionError("the recompute ran without weights")
    except TrunkError:
        pass
    finally:
        trunk_module._gather_in_recompute = hook


def reused_buffers_fail(run):
    """Two fixed buffers in turn: without checkpointing autograd's weights are overwritten."""
    whole, model = (run.model(sharded, checkpointing=False) for sharded in (False, True))
    expected = gradients(whole, loss_of(whole, run.ids(1)))
    units = sharded_trunk(model).units.values()
    size = max(unit.layout.full_bytes for unit in units)
    buffers, gather = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)], Unit.gather

    def reused(unit):
        found = gather(unit)
        buffers.reverse()
        into = buffers[0][: unit.layout.full_bytes]
        return found._replace(buffer=into.copy_(found.wait()), work=None)

    Unit.gather = reused
    try:
        same(gradients(model, loss_of(model, run.ids(1))), expected)
        raise RuntimeError("not noticed")
    except (RuntimeError, AssertionError) as error:
        assert "not noticed" not in str(error)
    finally:
        Unit.gather = gather


def without_always(register):
    return lambda module, hook, **_: register(module, hook)


def hooks_that_an_early_stop_skips_leave_layers_open(run):
    """A checkpoint around the layer's call stops its recompute early, by raising."""
    for always in (True, False):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).requires_grad_(False)
        units = [(f"layer{n}", layer) for n, layer in enumerate(layers)]
        register = nn.Module.register_forward_hook
        if not always:
            nn.Module.register_forward_hook = without_always(register)
        try:
            shards = TrunkShards(layers, units, run.group, torch.device("cpu"))
        finally:
            nn.Module.register_forward_hook = register
        x = torch.ones(2, 8, requires_grad=True)
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()
        # nothing is needed after the layer's last saved tensor, its weight
        assert bool(shards._open) != always, shards._open
