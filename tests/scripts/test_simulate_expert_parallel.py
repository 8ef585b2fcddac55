"""The simulation counts with the run's arithmetic, and says what ranks hold and send."""

import re

import numpy as np
import pytest

import simulate_expert_parallel as simulation


@pytest.fixture(scope="module")
def sixteen():
    return simulation.simulate(16, gpu="h200", tokens=64, skew=0.5)


def test_every_row_is_sent_and_worked_on_once(sixteen):
    rows = 16 * 64 * 16
    for found in sixteen.rows.values():
        assert len(found) == 16 and found.sum() == rows
    assert sixteen.rows["placed"].max() < sixteen.rows["contiguous"].max()
    for each, once in zip(sixteen.sent, sixteen.unique, strict=True):
        assert each.dispatch == 64 * 57_344 * 2 == each.combine
        # a token's 16 experts lie on some 10 of 16 ranks
        assert 0.55 * each.dispatch < once.dispatch < 0.75 * each.dispatch


def test_tokens_choose_distinct_experts_and_hot_ones_more_often(sixteen):
    generator = np.random.default_rng(1)
    a = sixteen.plan.architecture
    chosen = simulation.choose_experts(a, 500, 1.0, generator)
    assert chosen.shape == (500, 16)
    assert all(len(set(row)) == 16 for row in chosen.tolist())
    counts = np.bincount(chosen.ravel(), minlength=896)
    assert counts.max() > 20 * counts.mean()


def test_it_prints_memory_bytes_and_messages_of_every_number_of_ranks(capsys):
    assert simulation.main(["--ranks", "16", "32", "--tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert "# 16 x NVIDIA H200 SXM: 56 experts" in out and "# 32 x" in out
    assert re.findall(r"packed_experts +([\d.]+ GB)", out) == ["90.4 GB", "45.2 GB"]
    # 8 exchanges a layer with its recomputation, to each of the other ranks
    assert f"{92 * 8 * 15:,} messages" in out and f"{92 * 8 * 31:,} messages" in out


def test_more_ranks_than_experts_are_refused(capsys):
    assert simulation.main(["--ranks", "1000"]) == 2
    assert "expected 1 to 896" in capsys.readouterr().err
