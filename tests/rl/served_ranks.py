"""What each process of a job does that samples from one server; ranks.py starts them.

    python served_ranks.py FOLDER URL

FOLDER holds ``sft_base`` and ``prompts.jsonl``, and the server reads adapters below it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parallel"))

import pytest
import rollout_runs
import torch.distributed as dist

from k3tune.arguments import RolloutArguments
from k3tune.errors import RolloutError
from k3tune.rl.engines.replicas import HttpEngine
from k3tune.rl.engines.replicas_shared import SharedHttpEngine
from k3tune.rl.engines.vllm import VllmDialect
from k3tune.train import prepare_launch


def refusals(folder: Path, url: str) -> None:
    """What fails in one process is an error in both."""
    engine = HttpEngine([url], VllmDialect())
    shared = SharedHttpEngine(engine)
    with pytest.raises(RolloutError, match="is no adapter directory"):
        shared.load_adapter(1, folder)
    with pytest.raises(RolloutError, match="differs from the trainer's"):
        shared.check_base([([1], [2])], [[-50.0]])

    def lost(version: int, name: str, path: Path) -> None:
        raise RolloutError("the server is gone")

    engine.adopt = lost
    said = "server is gone" if dist.get_rank() else "1 of the run's processes cannot sample"
    with pytest.raises(RolloutError, match=said):
        shared.load_adapter(1, folder / "grpo_whole" / "adapter")
    shared.close()


def main(folder: Path, url: str) -> None:
    """Runs with whole experts, with experts spread, and with overlap."""
    prepare_launch()
    dist.init_process_group("gloo")
    served = {"engine": "k3tune", "engine_urls": [url]}
    ahead = RolloutArguments(**served, on_stale_version="correct", overlap=True)
    for run, size, rollout, steps in (
        ("whole", 1, RolloutArguments(**served), 2),
        ("spread", 2, RolloutArguments(**served), 2),
        ("ahead", 2, ahead, 3),
    ):
        trainer = rollout_runs.train_grpo(folder, run, size, 2, rollout, steps)
        trainer.engine.close()
    refusals(folder, url)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
