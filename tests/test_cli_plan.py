"""``k3tune plan`` and ``k3tune placement`` through the command line."""

import json

import numpy as np
import pytest

from command_line import run_command
from k3tune.parallel.placement import read_placement
from k3tune.parallel.router_counts import RouterCounts

KEYS = {
    "parameters",
    "dispatch_values_per_token",
    "conventional_dispatch_values_per_token",
    "bytes_per_rank",
    "bf16_trainer_bytes_per_rank",
    "fits",
    "smallest_fit",
    "decode",
}
PARTS = {
    "routed_experts",
    "latent_projections",
    "shared_experts",
    "embedding_and_head",
    "attention",
    "dense_mlp",
    "vision",
    "other",
}


@pytest.fixture
def run(capsys):
    return lambda *arguments: run_command(capsys, *arguments)


@pytest.fixture
def facts(run):
    def ask(*arguments):
        status, out, err = run("plan", *arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return ask


@pytest.fixture
def counts_file(tmp_path):
    """Rows of two layers of 896 experts, the hot ones of each at another place."""
    hot = (1e6 / np.arange(1, 897) ** 0.5).astype(np.int64)
    RouterCounts(896, {1: hot, 2: hot[::-1].copy()}).write(tmp_path / "counts.json")
    return tmp_path / "counts.json"


def test_without_a_path_the_published_model_is_planned(facts):
    found = facts()
    assert found.keys() >= KEYS
    parameters = found["parameters"]
    assert parameters.keys() == PARTS | {"total", "active"}
    assert parameters["total"] == sum(parameters[part] for part in PARTS) == 2_779_931_837_184
    assert parameters["active"] == 104_189_614_848
    assert found["dispatch_values_per_token"] == 57_344
    assert found["conventional_dispatch_values_per_token"] == 114_688
    held = found["bytes_per_rank"]
    assert held["total"] == sum(size for part, size in held.items() if part != "total")
    assert found["bf16_trainer_bytes_per_rank"] > held["total"]
    assert found["fits"] is True and found["smallest_fit"] == 16
    assert set(found["decode"][0]) == {"batch", "distinct_experts", "expert_bytes", "trunk_bytes"}


def test_the_layout_is_what_the_options_say(facts):
    found = facts(
        *("--gpus", 64, "--gpu", "mi355x", "--ep", 32, "--zero", 1, "--trunk-shard", 16),
        *("--sequence-length", 8192, "--micro-batch", 2, "--no-checkpointing"),
        *("--targets", "experts, attention", "--form", "per_expert", "--rank", 8),
    )
    layout = found["layout"]
    assert (layout["gpus"], layout["expert_parallel_size"], layout["zero_stage"]) == (64, 32, 1)
    assert (layout["trunk_ranks"], layout["sequence_length"], layout["micro_batch"]) == (
        16,
        8192,
        2,
    )
    assert layout["activation_checkpointing"] is False
    held = found["bytes_per_rank"]["activations"]
    assert held == found["activation_bytes_per_rank"]["without_checkpointing"]
    assert set(found["adapter"]["by_group"]) == {"experts", "attention"}
    assert found["adapter"]["by_group"]["experts"] == 92 * 896 * 3 * 8 * (3072 + 3584)
    assert found["hardware"]["key"] == "mi355x"


def test_own_memory_and_bandwidth_are_given_in_gigabytes(facts):
    found = facts("--gpus", 8, "--gpu-memory-gb", 300, "--gpu-bandwidth", 1000)
    assert found["hardware"]["memory_bytes"] == 300_000_000_000
    assert found["hardware"]["bandwidth_bytes_per_s"] == 1e12
    assert found["fits"] is True and found["smallest_fit"] == 8


def test_a_folder_is_planned_from_its_config_alone(facts, fixtures, tmp_path):
    (tmp_path / "config.json").write_bytes((fixtures / "k3_tiny" / "config.json").read_bytes())
    found = facts(tmp_path, "--gpus", 1, "--gpu", "cpu")
    assert found["fits"] and found["smallest_fit"] == 1
    assert found["parameters"]["total"] < 10_000_000


def test_people_get_a_table(run):
    status, out, err = run("plan", "--gpus", 16, "--trunk-shard", "none")
    assert (status, err) == (0, "")
    assert "2,722,740,830,208  3 x 3584 x 3072 = 33.03 M, x 896 experts x 92 layers" in out
    assert "does not fit: " in out and "57,344" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_search_says_the_layout_it_found(facts, run):
    found = facts("--search", "--gpu", "b300")
    assert found["fits"] and found["layout"]["gpus"] == found["smallest_fit"] == 8
    status, _, err = run("plan", "--search", "--gpus", 2)
    assert status == 2 and "no layout fits on up to 2 of" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", 6, "--ep", 4], "a divisor of the number of GPUs"),
        (["--zero", 3], "zero_stage is 3"),
        (["--imbalance", 0.9], "from 1 on"),
        (["--imbalance", "none.json"], "expected --ep too"),
        (["--imbalance", "none.json", "--ep", 16], "cannot read the router counts none.json"),
        (["--imbalance", 2, "--placement", "x.json"], "leave one of them out"),
        (["--targets", "nothing"], "matches no module"),
        (["--gpu-memory-gb", -1], "above 0"),
        (["no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, said):
    status, out, err = run("plan", *arguments)
    assert (status, out) == (2, "")
    assert said in err and len(err.strip().splitlines()) == 1


def test_measured_counts_give_the_imbalance_and_a_placement_lowers_it(facts, run, counts_file):
    placement = counts_file.with_name("placement.json")
    status, out, _ = run("placement", counts_file, "--ranks", 32, "--out", placement)
    assert status == 0 and "contiguous" in out and "placed" in out
    assert read_placement(placement).num_ranks == 32
    options = ("--gpus", 32, "--ep", 32, "--imbalance", counts_file)
    plain, placed = facts(*options), facts(*options, "--placement", placement)
    assert plain["step"]["imbalance"] > 3 > 1.1 > placed["step"]["imbalance"]
    assert plain["step"]["lost_s"] > placed["step"]["lost_s"] > 0


def test_a_placement_is_reported_as_json(run, counts_file):
    status, out, err = run("placement", counts_file, "--ranks", 16, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["placed"]["imbalance"] < 1.05 < found["contiguous"]["imbalance"]
    assert found["least_imbalance"] <= found["placed"]["imbalance"]
    assert found["contiguous"]["layers"]["2"]["hottest"][0][0] == 895


def test_help_names_every_option_and_loads_nothing_heavy(run):
    status, out, _ = run("plan", "--help")
    assert status == 0
    for option in ("--gpus", "--gpu ", "--ep", "--zero", "--trunk-shard", "--search", "--json"):
        assert option in out


def test_counts_are_held_against_ranks_and_base_and_never_written_over(run, counts_file, tmp_path):
    before = counts_file.read_bytes()
    placed = tmp_path / "placed.json"
    assert run("placement", counts_file, "--ranks", 4, "--out", placed)[0] == 0
    measured = ("--ep", 8, "--imbalance", counts_file)
    for arguments, said in (
        (("placement", counts_file, "--ranks", 4, "--out", counts_file), "it is the input"),
        (("plan", *measured, "--placement", placed), "is over 4 ranks and --ep is 8"),
        (("plan", "k3tune/assets/k3-nano", *measured), "expected 32 as in the config"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert counts_file.read_bytes() == before
