"""Options of an expert-parallel run."""

import pytest
from trl import SFTConfig

from k3tune.arguments import ParallelArguments
from k3tune.errors import ConfigError
from k3tune.train.run_config import RunConfig
from tiny_run import COMMON


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0, expected an integer of at least"),
        ({"expert_parallel_size": 2.0}, "expert_parallel_size is 2.0, expected an integer"),
        ({"expert_parallel_size": 2, "mxfp8_dispatch": 1}, "mxfp8_dispatch is 1, expected true"),
        ({"trunk_shard": "all"}, "trunk_shard is 'all', expected none, node or a number"),
        ({"trunk_shard": "0"}, "trunk_shard is '0', expected none, node or a number"),
        ({"deduplicate_dispatch": True}, "expert_parallel_size is 1, which would not read it"),
        ({"expert_placement": "p.json"}, "expert_parallel_size is 1, which would not read it"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ParallelArguments(**options)


def test_yaml_may_give_the_trunks_ranks_as_a_number():
    assert ParallelArguments(trunk_shard=8).trunk_shard == "8"


def test_a_resumed_run_may_be_spread_otherwise(tmp_path, caplog):
    training = SFTConfig(str(tmp_path), **COMMON)
    before, after = (
        RunConfig.resolve(training, (), (ParallelArguments(expert_parallel_size=size),))
        for size in (4, 2)
    )
    after.compare(before.options, tmp_path)
    assert "expert_parallel_size (was 4, is 2)" in caplog.text
