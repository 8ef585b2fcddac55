"""A process among four that share experts reads and holds a quarter of them. Slow tier."""

import json
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from checkpoints import build_checkpoint
from k3tune.parallel.shards import ExpertShards, shard_bytes
from k3tune.published.architecture import parse_config, read_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
WORKER = Path(__file__).with_name("memory_cases.py")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each process noted, by the number that share experts; and the base."""
    folder = tmp_path_factory.mktemp("memory")
    build_checkpoint(
        folder / "base",
        num_hidden_layers=4,
        first_k_dense_replace=0,
        num_experts=224,
        num_experts_per_token=8,
        moe_intermediate_size=512,
        routed_expert_hidden_size=512,
    )
    found = {}
    for size in (1, 4):
        run_ranks(WORKER, size, folder, size)
        files = [folder / f"memory_of_{size}-{rank}" for rank in range(size)]
        found[size] = [json.loads(file.read_text()) for file in files]
    return parse_config(read_config(folder / "base")), found


def test_a_process_reads_its_quarter(measured):
    architecture, found = measured
    whole = found[1][0]
    assert whole["experts"] > 50 * whole["trunk"]
    for rank, facts in enumerate(found[4]):
        own = shard_bytes(architecture, ExpertShards(architecture.num_experts, 4), rank)
        assert facts["experts"] == own
        read = facts["read"] - (whole["read"] - whole["experts"])
        assert read <= whole["experts"] / 4 * 1.01


def test_peak_memory_follows(measured):
    """Above what Python and the imports take; measured 107 MB after 388, and 197 after 521."""
    _, found = measured
    whole = found[1][0]
    spared = 0.75 * whole["experts"]
    for facts in found[4]:
        print({name: (whole[name] / 1e6, facts[name] / 1e6) for name in facts})
        # a quarter, the trunk, and what is on its way from the file (measured: 9 MB)
        assert facts["loading"] <= facts["experts"] + facts["trunk"] + 16e6
        # activations are the same; factors and their gradients are a quarter too
        assert whole["training"] - facts["training"] >= spared
