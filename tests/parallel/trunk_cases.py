"""What must hold of a sharded trunk between processes; test_trunk_processes.py launches them."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from trunk_mutants import (
    a_recompute_without_gather_fails,
    hooks_that_an_early_stop_skips_leave_layers_open,
    reused_buffers_fail,
)
from trunk_run import (
    STEPS,
    draw_factors,
    factors,
    gradients,
    loss_of,
    main,
    same,
    train,
    watched_buffers,
)

from k3tune.lora import (
    LoraSpec,
    adapter_state,
    attach_lora,
    disable_adapter,
    load_adapter,
    save_adapter,
)
from k3tune.lora.fingerprint import base_digests, base_fingerprint, combine_digests
from k3tune.model import checkpoint as reading
from k3tune.model import load_base
from k3tune.parallel.trunk_loading import (
    load_sharded_base,
    shard_trunk,
    sharded_trunk,
    trunk_digests,
)
from k3tune.parallel.trunk_unit import TrunkError
from k3tune.published.safetensors_files import ShardReader

F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def five_steps(run, *, stage, dtype, experts=1):
    whole = run.model(False, dtype=dtype, experts=experts)
    losses, norms, adapter = train(run, whole, stage=stage)
    model = run.model(True, dtype=dtype, experts=experts)
    shards = sharded_trunk(model)
    with watched_buffers() as buffers:
        found = train(run, model, stage=stage)
        shards.drop_prefetch()
        assert buffers.peak <= 3, buffers.peak
        assert buffers.alive() == 0
    assert torch.equal(found[0], losses), (found[0] - losses).abs().max()
    assert found[1] == norms and all(norm > 0.3 for norm in norms)
    same(found[2], adapter)
    assert not torch.equal(losses[0], losses[-1])
    counts = shards.take_counts()
    # a step: three forwards of all units, two recomputes of all but the embedding
    assert counts.gathers == STEPS * (3 * 5 + 2 * 4)
    # missed: the first unit ever and after a forward alone, and the last one of each backward
    assert counts.gathers - counts.prefetched == 1 + STEPS * (1 + 2), counts


def zero1_is_bit_equal(run):
    """ZeRO-1, fp32 trunk: losses, norms before clipping, adapters; at most 3 units gathered."""
    five_steps(run, stage=1, dtype=torch.float32)


def zero2_is_bit_equal(run):
    """ZeRO-2, bf16 trunk with its F32 weights: the same."""
    five_steps(run, stage=2, dtype=torch.bfloat16)


def experts_may_be_spread_too(run):
    """Experts over two and four ranks, their groups inside, across or equal to the trunk's."""
    for experts in (2, 4):
        if run.ranks % experts == 0:
            for stage in (1, 2):
                five_steps(run, stage=stage, dtype=torch.float32, experts=experts)


def f32_stays_f32_under_an_engine_with_bf16_on(run):
    """Five steps of an engine that casts every parameter it sees: the trunk is the checkpoint's."""
    model = run.model(True, dtype=torch.bfloat16)
    train(run, model, stage=2, bf16=True)
    assert {value.dtype for value in factors(model).values()} == {torch.bfloat16}
    untouched = load_base(run.base)
    shards, found = sharded_trunk(model), 0
    for name, unit in shards.units.items():
        with shards.opened(name):
            for slot in unit.layout.slots:
                module, attribute = slot.owners[0]
                weight, original = getattr(module, attribute), untouched.get_parameter(slot.name)
                assert weight.dtype == original.dtype and torch.equal(weight, original), slot.name
                found += slot.name.endswith(F32)
                assert (weight.dtype == torch.float32) == slot.name.endswith(F32), slot.name
    assert found > 10


def a_rank_reads_and_holds_its_range_only(run):
    """Bytes read and held while loading; the shards' size."""
    whole = sum(p.nbytes for p in load_base(run.base).parameters())
    read, peak = [], 0
    read_into, staging = ShardReader.read_into, reading._STAGING_BYTES

    def counted(shard, name, offset, buffer):
        nonlocal peak
        read_into(shard, name, offset, buffer)
        if ".experts." not in name:
            read.append((name, offset, len(buffer)))
            # once in each layer and for each table: a look takes a while
            if name.endswith(("o_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                peak = max(peak, live_bytes() - before)

    before = live_bytes()
    ShardReader.read_into, reading._STAGING_BYTES = counted, 1024
    try:
        model = load_sharded_base(run.base, run.group)
    finally:
        ShardReader.read_into, reading._STAGING_BYTES = read_into, staging
    shards = sharded_trunk(model)
    held = {name: p.nbytes for name, p in model.named_parameters()}
    head = sum(size for name, size in held.items() if ".experts." not in name)
    sharded = whole - sum(held.values())
    layers = [unit.layout.full_bytes for unit in shards.units.values()]
    # "language_model." stands before names in files
    trunk = [part for part in read if part[0].removeprefix("language_model.") not in held]
    size = 1 if run.group is None else dist.get_world_size(run.group)
    # A_log is read whole, to see that its end is empty: 3 layers, 5 zeros behind 2 heads
    padded = sum(part[2] for part in trunk if part[0].endswith("A_log"))
    assert sum(part[2] for part in trunk) <= sharded / size + padded + max(layers)
    assert size == 1 or sum(part[2] for part in read) < whole * 0.9
    assert shards.resident_bytes <= sharded / size * 1.01 + 256 * 32 * len(layers)
    # shards, head and experts, and while one tensor is on its way no more than a layer
    assert peak <= shards.resident_bytes + sum(held.values()) + max(layers), (peak, layers)
    assert held["lm_head.weight"] and head < sharded


def live_bytes():
    """Bytes of all tensors with data in this process."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sharded_in_memory_is_sharded_on_loading(run):
    """One trunk, whichever way it was spread; its fingerprint is the whole base's."""
    whole = run.model(False)
    expected = base_fingerprint(whole)
    shards = shard_trunk(whole, run.group)
    loaded = sharded_trunk(run.model(True))
    for name, unit in loaded.units.items():
        assert torch.equal(unit.shard, shards.units[name].shard), name
    assert trunk_digests(loaded) == trunk_digests(shards)
    assert combine_digests(base_digests(whole) | trunk_digests(shards)) == expected
    # the second model's adapter was there before its trunk was spread
    ids = run.ids(1)
    assert torch.equal(loss_of(whole, ids), loss_of(run.model(False), ids))


def an_exception_leaves_nothing_behind(run):
    """A forward that fails in the middle of a layer, in the first pass and in the recompute."""
    whole, model = run.model(False), run.model(True)
    shards = sharded_trunk(model)
    moe = model.get_base_model().model.layers[1].block_sparse_moe
    expected = gradients(whole, loss_of(whole, run.ids(2)))
    for calls_before in (0, 1):
        left = iter(range(calls_before))

        def fail(*_, left=left):
            if next(left, None) is None:
                raise ValueError("asked to fail")

        handle = moe.register_forward_pre_hook(fail)
        with watched_buffers() as buffers:
            try:
                gradients(model, loss_of(model, run.ids(1)))
                raise AssertionError("the forward did not fail")
            except ValueError as error:
                assert "asked to fail" in str(error)
            handle.remove()
            shards.drop_prefetch()
            # the exception's frames refer to each other
            gc.collect()
            # torch keeps the graph of a recompute that failed until the next backward
            assert not shards._open and buffers.alive() <= calls_before
            same(gradients(model, loss_of(model, run.ids(2))), expected)
            shards.drop_prefetch()
            assert buffers.alive() == 0


def backwards_may_come_in_any_order(run):
    """Two forwards, then their backwards, with and without checkpointing; all is kept."""
    for checkpointing in (True, False):
        whole = run.model(False, checkpointing=checkpointing)
        model = run.model(True, checkpointing=checkpointing)
        expected = [gradients(whole, loss_of(whole, run.ids(k))) for k in (0, 1)]
        for order in ((0, 1), (1, 0)):
            losses = [loss_of(model, run.ids(k)) for k in (0, 1)]
            for k in order:
                same(gradients(model, losses[k]), expected[k])


def adapters_come_and_go(run):
    """A second adapter attached later, none, the first again; the base is the base."""
    whole, model = run.model(False, train=False), run.model(True, train=False)
    bare = load_base(run.base, dtype=torch.float32)
    for each in (whole, model):
        attach_lora(each, LoraSpec(targets=("attention",), rank=3, alpha=6), adapter_name="second")
        draw_factors(each, 8)
    ids = run.ids(3)
    with torch.no_grad():
        first = model(ids).logits
        assert torch.equal(first, whole(ids).logits)
        with disable_adapter(model):
            assert torch.equal(model(ids).logits, bare(ids).logits)
        for each in (whole, model):
            each.set_adapter("second")
        second = model(ids).logits
        assert torch.equal(second, whole(ids).logits)
        assert not torch.equal(second, first)
    model.delete_adapter("second")
    model.set_adapter("default")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, first)


def an_adapter_is_saved_and_loaded(run):
    """Saved beside a sharded base and read into another: the same directory, the same factors."""
    whole, model = run.model(False), run.model(True)
    shards = sharded_trunk(model)
    fingerprint = combine_digests(base_digests(model) | trunk_digests(shards))
    options = {"dtype": torch.float32, "base_fingerprint": fingerprint}
    if run.rank == 0:
        save_adapter(model, run.folder / "sharded", **options)
        save_adapter(whole, run.folder / "whole", dtype=torch.float32)
        for file in (run.folder / "whole").iterdir():
            assert file.read_bytes() == (run.folder / "sharded" / file.name).read_bytes(), file
    dist.barrier()
    again = load_sharded_base(run.base, run.group, dtype=torch.float32)
    again = load_adapter(again, run.folder / "sharded", trainable=True)
    same(adapter_state(again), adapter_state(model))
    again.train().get_base_model().activation_checkpointing_enable()
    ids = run.ids(4)
    same(gradients(again, loss_of(again, ids)), gradients(whole, loss_of(whole, ids)))


def generation_gives_the_same_tokens(run):
    """Greedy, with a cache, from a model that trains in between."""
    whole, model = run.model(False), run.model(True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 159}
    for step in range(2):
        loss = loss_of(model, run.ids(step))
        tokens = [each.generate(run.ids(9, length=4), **options) for each in (whole, model)]
        assert torch.equal(*tokens)
        same(gradients(model, loss), gradients(whole, loss_of(whole, run.ids(step))))


def weights_are_there_in_their_layer_only(run):
    """Use elsewhere is refused with what to do; ``opened`` gives the values."""
    model = run.model(True)
    base, shards = model.get_base_model(), sharded_trunk(model)
    attention = base.model.layers[0].self_attn
    uses = (
        lambda: attention.A_log.exp(),
        lambda: torch.nn.functional.linear(torch.ones(64), attention.q_proj.base_layer.weight),
        lambda: base.model.embed_tokens.weight[0],
        lambda: base.model.layers[1].block_sparse_moe.gate.weight.float(),
        lambda: attention.dt_bias.tolist(),
        lambda: base.get_input_embeddings().weight.mean(),
    )
    for use in uses:
        try:
            use()
            raise AssertionError("a sharded weight was used outside its layer")
        except TrunkError as error:
            assert "call the layer, or read the weight inside" in str(error), error
    assert attention.A_log.shape == (2,) and attention.A_log.dtype == torch.float32
    expected = load_base(run.base, dtype=torch.float32).model.layers[0].self_attn
    with shards.opened("model.layers.0"), shards.opened("model.layers.0"):
        assert torch.equal(attention.A_log, expected.A_log)
    assert repr(attention.A_log) == "AbsentWeight((2,), torch.float32, cpu)"
    left = [name for name, _ in model.named_parameters() if ".layers." in name]
    assert all(".lora_" in name or name.endswith((".packed", ".scale")) for name in left), left


def ranks_that_go_apart_are_told(run):
    """Two layers of one size gathered together: not a wrong answer, an error."""
    if run.group is None or dist.get_world_size(run.group) == 1:
        return
    shards = sharded_trunk(run.model(True))
    place = dist.get_rank(run.group)
    sizes = {name: unit.layout.part_bytes for name, unit in shards.units.items()}
    assert sizes["model.layers.1"] == sizes["model.layers.2"]
    shards._following = lambda number: None
    try:
        with shards.opened("model.layers.1" if place == 0 else "model.layers.2"):
            # the last rank's number is what all see
            assert place > 0, "rank 0 was given another layer's bytes"
    except TrunkError as error:
        assert place == 0 and "gathered different layers" in str(error)


DEFAULT = [
    zero2_is_bit_equal,
    f32_stays_f32_under_an_engine_with_bf16_on,
    a_rank_reads_and_holds_its_range_only,
    sharded_in_memory_is_sharded_on_loading,
    an_exception_leaves_nothing_behind,
    backwards_may_come_in_any_order,
    adapters_come_and_go,
    an_adapter_is_saved_and_loaded,
    generation_gives_the_same_tokens,
    weights_are_there_in_their_layer_only,
    ranks_that_go_apart_are_told,
    a_recompute_without_gather_fails,
    reused_buffers_fail,
    hooks_that_an_early_stop_skips_leave_layers_open,
]
SLOW = [zero1_is_bit_equal, experts_may_be_spread_too]
CASES = {case.__name__: case for case in (*SLOW, *DEFAULT)}


if __name__ == "__main__":
    main(CASES)
