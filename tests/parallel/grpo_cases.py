"""What each process of an expert-parallel GRPO job does in these tests; ranks.py starts them.

python grpo_cases.py FOLDER EXPERT_PARALLEL_SIZE
"""

import json
import sys
from pathlib import Path

import grpo_runs
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trl import SFTConfig

from k3tune.lora import save_adapter
from k3tune.parallel.gather import FactorRows
from k3tune.train import prepare_launch


def main(folder: Path, size: int) -> None:
    """Every case of ``grpo_runs``, its results left beside the bases."""
    prepare_launch()
    torch.set_num_threads(1)
    # transformers starts torch.distributed
    assert SFTConfig(folder, use_cpu=True, bf16=False).device.type == "cpu"
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in (*grpo_runs.CASES, *grpo_runs.EXACT_CASES):
        found = grpo_runs.run(folder, case, size, world)
        model, parallel = found["model"], found["parallel"]
        save_file(found["gradients"], folder / f"{case.name}.gradients-{rank}")
        facts = {name: found[name] for name in ("losses", "lengths")}
        (folder / f"{case.name}.json-{rank}").write_text(json.dumps(facts))
        rows = None if parallel is None else FactorRows(parallel, model, "default")
        if rows is not None or rank == 0:
            path = folder / f"{case.name}.adapter"
            save_adapter(
                model,
                path,
                dtype=torch.float32,
                base_fingerprint="none",
                overwrite=True,
                gather=rows,
            )
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
