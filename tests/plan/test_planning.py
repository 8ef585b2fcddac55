"""Plans of the published K3: what fits where, traffic, decoding, time, search."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest

from checkpoints import make_config
from k3tune.commands.plan import Gpu
from k3tune.errors import AdapterError, ConfigError
from k3tune.lora import LoraSpec
from k3tune.plan import plan
from k3tune.plan.figures import plan_json
from k3tune.plan.hardware import dense_peak, find_hardware, known_hardware
from k3tune.plan.layout import largest_expert_parallel_size
from k3tune.plan.planning import DEFAULT_LORA, Wishes, gpu_counts
from k3tune.plan.render import render_plan
from k3tune.plan.traffic import distinct_experts

GB = 1e9


@pytest.fixture(scope="module")
def sixteen():
    """K3 on 16 H200, the trunk shared by the ranks of a node."""
    return plan(gpu="h200", gpus=16)


@pytest.mark.parametrize(("gpu", "gpus"), [("h200", 16), ("b300", 8)])
def test_k3_fits_with_its_trunk_sharded_over_a_node_and_not_without(gpu, gpus):
    sharded = plan(gpu=gpu, gpus=gpus, wishes=Wishes(trunk_shard="node"))
    whole = plan(gpu=gpu, gpus=gpus, wishes=Wishes(trunk_shard="none"))
    assert sharded.fits and not whole.fits
    assert sharded.smallest_fit == gpus < whole.smallest_fit
    experts, trunk = (whole.bytes_per_rank[part] for part in ("packed_experts", "trunk"))
    assert experts + trunk > whole.hardware.memory_bytes


def test_the_parts_are_those_of_the_comparison_of_ways_to_shard(sixteen):
    parts, base = sixteen.bytes_per_rank, sixteen.base
    assert parts["packed_experts"] == pytest.approx(90.4 * GB, abs=0.05 * GB)
    assert base.trunk == pytest.approx(113.5 * GB, abs=0.05 * GB)
    assert base.head == base.embedding == pytest.approx(2.35 * GB, abs=0.005 * GB)
    assert parts["trunk"] == pytest.approx((13.9 + 2.35) * GB, abs=0.05 * GB)
    # one layer a rank and kind: KDA, MLA, the dense first one
    assert base.layers[1] == pytest.approx(1.268 * GB, abs=0.001 * GB)
    assert base.layers[3] == pytest.approx(0.844 * GB, abs=0.001 * GB)
    assert base.layers[0] == pytest.approx(2.34 * GB, abs=0.005 * GB)
    # three KDA layers are 3.8 GB; next to the dense layer it is more
    assert 3.8 * GB < parts["trunk_gathered"] < 4.9 * GB
    # received in a forward and its recomputation: 97.3 and 95.2 GB
    assert sixteen.traffic.trunk == pytest.approx((97.3 + 95.2) * GB, abs=0.2 * GB)
    assert sixteen.step.gather_s == pytest.approx(0.43, abs=0.01)


def test_decoded_experts_need_more_than_three_times_the_gpus(sixteen):
    more = sixteen.bf16_trainer_bytes_per_rank - sixteen.bytes_per_rank["total"]
    assert more == 2 * 2_722_740_830_208 // 16 - 90_403_504_128
    assert sixteen.bf16_smallest_fit >= 3 * sixteen.smallest_fit


def test_dispatch_is_half_of_a_conventional_one(sixteen):
    figures = plan_json(sixteen)
    assert figures["dispatch_values_per_token"] == 57_344
    assert figures["conventional_dispatch_values_per_token"] == 114_688
    layer = sixteen.traffic.layer
    assert layer.dispatch == layer.combine == 2048 * 57_344 * 2
    assert layer.gradients == 2 * layer.dispatch
    again = replace(Wishes(), activation_checkpointing=False)
    once = plan(gpu="h200", gpus=16, wishes=again).traffic
    assert once.dispatch == 92 * layer.total
    assert sixteen.traffic.dispatch == 92 * (layer.total + layer.forward)


def test_decoding_reads_distinct_experts_of_a_layer(sixteen):
    rows = {read.batch: read for read in sixteen.decode}
    for batch, read in rows.items():
        expected = 896 * (1 - (1 - 16 / 896) ** batch)
        assert read.distinct_experts == pytest.approx(expected)
        assert read.expert_bytes == round(expected * 17_547_264)
    assert rows[1].distinct_experts == pytest.approx(16)
    assert rows[1].trunk_bytes == rows[1024].trunk_bytes
    layers = [sixteen.base.layers[layer] for layer in range(1, 93)]
    assert rows[1].trunk_bytes == round(sum(layers) / 92)


def test_the_uniform_estimate_is_too_low_for_one_sequence_and_too_high_for_many(sixteen):
    reads = {read.batch: read for read in sixteen.reads}
    assert reads[1].uniform < 0.5 * reads[1].total
    assert reads[64].uniform > 3 * reads[64].total
    # at last everything is read once: the checkpoint without image tower and embedding
    everything = sixteen.base.experts + sixteen.base.trunk - sixteen.base.embedding
    assert reads[1024].total == pytest.approx(everything, rel=1e-3)


def test_a_step_is_slower_by_the_imbalance_of_what_waits(sixteen):
    worse = plan(gpu="h200", gpus=16, imbalance=1.5).step
    even = sixteen.step
    assert even.lost_s == 0 and even.imbalance == 1
    assert worse.lost_s == pytest.approx(0.5 * (even.experts_s + even.dispatch_s))
    assert worse.step_s == pytest.approx(even.step_s + worse.lost_s)
    assert worse.tokens_per_s == pytest.approx(16 * 2048 / worse.step_s)


def test_few_tokens_are_bound_by_reading_weights_and_many_by_arithmetic():
    short, long = (
        plan(gpus=16, wishes=Wishes(sequence_length=length)).step for length in (16, 65536)
    )
    bandwidth, peak = 4.8e12, 989e12
    # 256 tokens of all ranks reach 99 % of the experts, read in each of three passes
    reached = distinct_experts(plan().architecture, 16 * 16)
    expected = 3 * 92 * reached * 17_547_264 / 16 / bandwidth
    assert short.experts_s == pytest.approx(expected)
    flops = 65536 * 92 * 16 * 3 * 3584 * 3072 * 2 * (3 + 2 / 3)
    assert long.experts_s == pytest.approx(flops / peak)


@pytest.mark.parametrize("sequence_length", [2048, 8192])
def test_the_search_takes_the_fewest_gpus_that_hold_the_run(sequence_length):
    found = plan(search=True, gpus=256, wishes=Wishes(sequence_length=sequence_length))
    assert found.fits and found.layout.gpus == found.smallest_fit
    fewer = max(count for count in gpu_counts(8) if count < found.layout.gpus)
    size = largest_expert_parallel_size(fewer, 896)
    best = Wishes(sequence_length=sequence_length, expert_parallel_size=size, trunk_shard=fewer)
    assert not plan(gpus=fewer, wishes=best).fits
    default = plan(gpus=found.layout.gpus, wishes=Wishes(sequence_length=sequence_length))
    assert not default.fits or found.step.step_s <= default.step.step_s


def test_a_search_that_finds_nothing_says_so():
    with pytest.raises(ConfigError, match=r"no layout fits on up to 4 of NVIDIA H200"):
        plan(search=True, gpus=4)


@pytest.mark.parametrize("gpu", known_hardware())
def test_every_device_has_figures_and_their_source(gpu):
    device = find_hardware(gpu)
    rates = (device.bandwidth_bytes_per_s, device.flops_per_s, device.link_bytes_per_s)
    assert device.memory_bytes > 1 * GB and min(rates) > 0
    assert device.network_bytes_per_s <= device.link_bytes_per_s and len(device.source) > 40


def test_the_command_offers_every_device_and_a_runs_mfu_knows_them():
    assert get_args(get_args(Gpu)[0]) == known_hardware()
    assert dense_peak("NVIDIA H200") == find_hardware("h200").flops_per_s
    # of a slower card with nearly the same name
    assert dense_peak("NVIDIA H200 NVL") is None


def test_own_memory_and_bandwidth_replace_the_tables():
    device = find_hardware("h200", memory_gb=160, bandwidth_gb_per_s=5000)
    assert (device.memory_bytes, device.bandwidth_bytes_per_s) == (160 * GB, 5000 * GB)
    assert "160 GB" in device.name and device.flops_per_s == find_hardware("h200").flops_per_s
    assert plan(gpu=device, gpus=16, wishes=Wishes(sequence_length=8192)).fits


@pytest.mark.parametrize("wrong", [0, -1, 1e-300, 1e308, math.inf, math.nan])
def test_a_device_beyond_the_range_of_floats_is_refused(wrong):
    for figure in ("memory_gb", "bandwidth_gb_per_s"):
        with pytest.raises(ConfigError, match="expected a number of GB above 0"):
            find_hardware("h200", **{figure: wrong})


def test_a_search_keeps_to_every_split_that_was_asked_for():
    asked = Wishes(trunk_shard="none", activation_checkpointing=False)
    found = plan(gpu="mi355x", gpus=64, wishes=asked, search=True).layout
    assert (found.trunk_ranks, found.activation_checkpointing) == (1, False)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpu": "v100"}, "one of h200, h100"),
        ({"gpus": 0}, "at least 1"),
        ({"imbalance": 0.5}, "from 1 on"),
        ({"imbalance": math.nan}, "from 1 on"),
        ({"imbalance": 17.0}, "at most 16"),
        ({"imbalance": 1e300}, "at most 896"),
        ({"gpus": 2**31}, "at most 2147483647"),
        ({"wishes": Wishes(gpus_per_node=10**22), "search": True}, "at most 1024"),
        ({"wishes": Wishes(expert_parallel_size=0)}, "at least 1"),
        ({"wishes": Wishes(zero_stage=3)}, "would gather the packed experts"),
        ({"wishes": Wishes(zero_stage=0)}, "each rank's own norm"),
        ({"wishes": Wishes(expert_parallel_size=3)}, "a divisor of"),
        ({"wishes": Wishes(trunk_shard="rack")}, "none, node or a number"),
        ({"wishes": Wishes(trunk_shard=5)}, "a divisor of"),
        ({"wishes": Wishes(dtype="float16")}, "bfloat16, float32"),
        ({"wishes": Wishes(sequence_length=0)}, "at least 1"),
        ({"config": {"model_type": "llama"}}, "lacks fields of Kimi K3"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wrong, said):
    with pytest.raises(ConfigError, match=said):
        plan(**wrong)


def test_a_target_that_fits_nothing_is_refused():
    with pytest.raises(AdapterError, match="matches no module"):
        plan(lora=LoraSpec(("q_prij",)))


def test_experts_are_shared_by_as_many_ranks_as_share_them_evenly():
    sizes = {gpus: largest_expert_parallel_size(gpus, 896) for gpus in (1, 8, 24, 56, 96, 1792)}
    assert sizes == {1: 1, 8: 8, 24: 8, 56: 56, 96: 32, 1792: 896}


def test_a_small_config_is_planned_and_printed_too():
    config = make_config()
    found = plan(config, gpu="cpu", gpus=1, lora=replace(DEFAULT_LORA, rank=2))
    assert found.fits and found.smallest_fit == 1
    text = render_plan(found)
    assert "the config given" in text and "fewest GPUs that hold it, split as asked: 1" in text
    assert plan_json(found)["parameters"]["vision"] == 0


def test_a_plan_answers_within_a_second_and_without_torch(repository):
    code = "import sys, k3tune.cli\ntry:\n    k3tune.cli.main(['plan', '--json'])\n"
    code += "finally:\n    assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    # of the processor: a busy machine makes nobody's code slow
    before = sum(os.times()[2:4])
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["fits"] is True
    assert sum(os.times()[2:4]) - before < 1
