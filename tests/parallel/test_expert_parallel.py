"""Two processes that share experts train as one process does: losses, gradients, adapters."""

import json

import pytest
import torch
from comparisons import check_exact_run, check_run, facts, gradients, relative_l2_of_all
from expert_runs import BF16_CASE, CASES, EXACT_CASES, run_alone, shards_of

from k3tune.errors import ConfigError
from k3tune.model import load_base
from k3tune.parallel.expert_parallel import check_zero, choose_shards
from k3tune.parallel.groups import check_world
from k3tune.parallel.shards import ExpertShards, shard_bytes
from k3tune.published.architecture import parse_config, read_config


@pytest.fixture(scope="module")
def architecture(two):
    """Of the base."""
    return parse_config(read_config(two / "base"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_train_as_one_does(two, alone, case):
    check_run(two, case, alone[case.name], 2, 2)


@pytest.mark.parametrize("case", EXACT_CASES, ids=lambda case: case.name)
def test_every_tensor_agrees_where_the_trunk_computes_in_fp64(two, alone, case):
    check_exact_run(two, case, alone[case.name], 2, 2)


def test_a_bf16_trunk_differs_by_less_than_its_own_rounding(two):
    """Measured: gradients 2.4e-2 from one process's, which bf16 moved by 8.7e-2 from fp32's."""
    expected = run_alone(two / "base", BF16_CASE, 2)
    wide = run_alone(two / "base", BF16_CASE._replace(dtype="float32"), 2)
    names = wide["gradients"].keys()
    own = relative_l2_of_all([(expected["gradients"][n], wide["gradients"][n]) for n in names])
    found = relative_l2_of_all(gradients(two, BF16_CASE, expected, 2, 2))
    print(f"gradients {found:.1e}, rounding {own:.1e}")
    assert found < own
    first = facts(two, BF16_CASE)["losses"][0]
    assert first == pytest.approx(expected["losses"][0], rel=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_reads_the_bytes_of_its_experts_only(two, architecture, case, rank):
    whole = load_base(two / "base").load_report.bytes_read
    shards = shards_of(case, architecture.num_experts, 2)
    experts = [shard_bytes(architecture, shards, r) for r in (0, 1)]
    assert facts(two, case, rank)["bytes_read"] == whole - sum(experts) + experts[rank]


def test_one_of_four_ranks_reads_and_holds_a_quarter_of_the_expert_bytes(repository):
    nano = repository / "k3tune" / "assets" / "k3-nano"
    architecture = parse_config(read_config(nano))
    shards = ExpertShards(architecture.num_experts, 4)
    held = {layer: shards.experts(2, layer) for layer in architecture.moe_layers}
    whole, part = load_base(nano), load_base(nano, experts=held)
    packed = [
        sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
        for model in (whole, part)
    ]
    assert packed[1] == shard_bytes(architecture, shards, 2) == packed[0] // 4
    assert whole.load_report.bytes_read - part.load_report.bytes_read == packed[0] - packed[1]
    assert part.load_report.experts == held[1]


def test_layers_may_hold_different_experts(two):
    held = {1: (4, 0, 2), 2: (1, 6, 3)}
    model, whole = load_base(two / "base", experts=held), load_base(two / "base")
    for layer, ids in held.items():
        part, all_of_it = (m.model.layers[layer].block_sparse_moe.experts for m in (model, whole))
        assert part.local_experts.tolist() == list(ids)
        assert torch.equal(part.w2.packed, all_of_it.w2.packed[list(ids)])
    assert model.load_report.experts == held
    with pytest.raises(ConfigError, match="differ in layer 2, expected layers 1 to 2"):
        load_base(two / "base", experts={1: (0,)})
    with pytest.raises(ConfigError, match="names 1 to 2 experts a layer, expected as many in"):
        load_base(two / "base", experts={1: (0,), 2: (0, 1)})


def test_f32_tensors_stay_f32_in_a_bf16_trunk_under_deepspeed(two):
    dtypes = facts(two, BF16_CASE)["dtypes"]
    for name in ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias"):
        found = {dtype for key, dtype in dtypes.items() if name in key}
        assert found == {"torch.float32"}, name
    assert dtypes["model.embed_tokens.weight"] == "torch.bfloat16"
    assert {dtype for key, dtype in dtypes.items() if "packed" in key} == {"torch.uint8"}


@pytest.mark.parametrize(
    ("stage", "reason"), [(0, "clips by the norm of one rank"), (3, "average the gradients of")]
)
def test_zero_stages_that_train_experts_wrongly_are_refused(stage, reason):
    with pytest.raises(ConfigError, match=f"zero_stage is {stage}, expected 1 or 2.*{reason}"):
        check_zero(stage, 2)


def test_a_single_process_cannot_share_experts():
    with pytest.raises(ConfigError, match="expert_parallel_size is 2, but this is a single proc"):
        check_world(2)


def test_a_placement_for_another_run_is_refused(architecture, tmp_path):
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(ExpertShards(7, 3).to_json()))
    with pytest.raises(ConfigError, match="7 experts on 3 ranks, expected 7 experts and expert_p"):
        choose_shards(architecture, 2, str(file))
