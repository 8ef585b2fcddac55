"""Write a tiny Kimi K3 checkpoint in the published layout, with random weights.

    PYTHONPATH=tests python scripts/make_tiny_checkpoint.py FOLDER

Its builder is the tests' own (tests/checkpoints.py).
"""

import argparse
from pathlib import Path

from checkpoints import build_checkpoint


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description="Write a tiny random Kimi K3 checkpoint.")
    parser.add_argument("folder", type=Path, help="where to write it; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same weights")
    arguments = parser.parse_args()
    build_checkpoint(
        arguments.folder,
        seed=arguments.seed,
        num_hidden_layers=8,
        mla_layers=[3, 7],
        attn_res_block_size=4,
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=2,
    )


if __name__ == "__main__":
    main()
