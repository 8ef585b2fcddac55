"""The outermost layer of a recipe: what must stand before a distributed start, and exit codes.

Exit codes: 0 the run finished; 2 options, data or base are not usable, or the run was stopped by a
loss that is not finite (one sentence on stderr); 130 Ctrl-C; 143 SIGTERM came, the checkpoint is
written and the same command goes on from it.
"""

import logging
import os
import sys
from collections.abc import Callable

import torch

from k3tune.errors import K3TuneError
from k3tune.parallel.failures import failures_end_job

USER_ERROR = 2
INTERRUPTED = 128 + 2
TERMINATED = 128 + 15


def prepare_launch() -> None:
    """Get a process ready, before TRL's arguments are made (which starts torch.distributed).

    On a machine without GPU DeepSpeed would compile a C++ extension for shared-memory collectives
    at its start (40 s, and a failure without a compiler): gloo is used instead.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    main_process = os.environ.get("RANK", "0") == "0"
    logging.getLogger("k3tune").setLevel(logging.INFO if main_process else logging.ERROR)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available():
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False


def run_recipe(main: Callable[[], int]) -> int:
    """Call a recipe's ``main``; an error a user can cause becomes one sentence.

    In a job of several processes the failure of one ends the others too.

    Returns:
        The exit code.
    """
    try:
        with failures_end_job():
            return main()
    except K3TuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        # a progress bar has not ended its line
        sys.stderr.write(
            "\nstopped by Ctrl-C in the middle of a step: the same command goes on from the last "
            "checkpoint, if there is one\n"
        )
        return INTERRUPTED
