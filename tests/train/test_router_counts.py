"""A run leaves the rows its experts got, for placing them in the next one."""

from k3tune.parallel.placement import place_experts
from k3tune.parallel.router_counts import RouterCounts
from tiny_run import make_trainer, rows


def test_counts_are_written_with_a_checkpoint_and_place_the_experts(base_folder, tmp_path):
    lengths = (7, 12, 9, 4, 15, 6, 11, 8)
    trainer = make_trainer(
        base_folder, tmp_path, rows(lengths), save_strategy="steps", save_steps=2, max_steps=2
    )
    trainer.train()
    counts = RouterCounts.read(tmp_path / "router_counts.json")
    # two batches of four samples are all of them; two experts a token in the one MoE layer
    assert set(counts.layers) == {1} and counts.num_experts == 6
    assert counts.layers[1].sum() == 2 * sum(lengths)
    placed = place_experts(counts, 3)
    assert counts.imbalance(placed) <= counts.imbalance(counts.contiguous(3))
