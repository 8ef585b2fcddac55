"""One seed a completion, from the run's seed and the completion's place in the run alone.

A resumed run, and one on another number of processes, then draws what it would have drawn.
"""

import hashlib
from typing import Literal

from k3tune.rl.rollout import MAX_SEED

Stream = Literal["train", "eval", "floor"]


def sample_seed(run_seed: int, stream: Stream, generation: int, index: int) -> int:
    """The seed of one completion, 0 to ``MAX_SEED``.

    Args:
        run_seed: the trainer's ``seed``.
        stream: what it is sampled for.
        generation: how many times this stream has been sampled from before.
        index: place among the completions of all processes.
    """
    text = f"k3tune {run_seed} {stream} {generation} {index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & MAX_SEED
