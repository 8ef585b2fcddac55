"""One of two processes is lost while the other waits for it in a collective.

python lost_cases.py raise|kill|hang
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from k3tune.errors import K3TuneError
from k3tune.train.launch import run_recipe


def main() -> int:
    """Rank 1 gets lost; rank 0 asks for its part."""
    dist.init_process_group("gloo")
    dist.barrier()
    # long enough for signs of life
    time.sleep(3 if sys.argv[1] == "hang" else 0)
    if dist.get_rank() == 1:
        if sys.argv[1] == "raise":
            raise K3TuneError("sample 7 holds no token: leave it out")
        os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "kill" else signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    return 0


if __name__ == "__main__":
    sys.exit(run_recipe(main))
