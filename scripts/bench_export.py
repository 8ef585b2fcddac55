"""Measure an adapter's export: memory and speed of the streaming, and what a merge would lose.

    python scripts/bench_export.py stream [--gigabytes 2] [--experts 896] [--consumer vllm]
    python scripts/bench_export.py merge ADAPTER BASE [--ids ids.jsonl]

``stream`` writes a synthetic adapter, exports it in a process of its own and compares with a plain
copy of the file, both synced to disk. ``merge`` measures every expert's weights, and the loss of
base, adapter and merged base on the given rows (a line of JSON each: a list of ids, or an object
with input_ids and labels; random ids without).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

# In a process of its own, so that the peak is the export's. Exports and copies take turns, each
# right after the other's files are deleted: both write to memory in the same state.
ROUNDS = """
import json, shutil, sys, time
from pathlib import Path
def peak():
    # not getrusage: its figure starts with the parent's
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
bare = peak()
from bench_export import copy_seconds
from k3tune.lora.export.exporting import export_adapter
imported = peak()
file, out, consumer, repeats = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
copies, exports = [], []
for _ in range(repeats):
    copies.append(copy_seconds(file, out))
    out.unlink()
    start = time.perf_counter()
    export_adapter(file.parent, out, format=consumer)
    exports.append(time.perf_counter() - start)
    shutil.rmtree(out)
print(json.dumps([bare, imported, peak(), copies, exports]))
"""


def write_synthetic(folder: Path, size_bytes: int, experts: int, rank: int, form: str) -> None:
    """An adapter of K3's expert shapes, as many layers as fill ``size_bytes``."""
    import torch

    from k3tune.lora.shards import Entry, Pending, write_shards

    latent, width = 3584, 3072
    sides = {"w1": (latent, width), "w3": (latent, width), "w2": (width, latent)}
    noise = torch.randn(experts * rank * latent // 8).bfloat16().repeat(8)
    tensors: list[Pending] = []
    layer = 1
    while sum(pending.size_bytes for pending in tensors) < size_bytes:
        stack = f"base_model.model.language_model.model.layers.{layer}.block_sparse_moe.experts"
        for name, (inputs, outputs) in sides.items():
            for half, matrix in (("A", (rank, inputs)), ("B", (outputs, rank))):
                shared = form == "shared_outer" and (half == "A") == (name != "w2")
                shape = (1 if shared else experts, *matrix)
                count = shape[0] * shape[1] * shape[2]
                tensors.append(
                    Pending(
                        [Entry(f"{stack}.{name}.lora_{half}.weight", torch.bfloat16, shape)],
                        lambda count=count: iter([noise[:count]]),
                    )
                )
        layer += 1
    folder.mkdir(parents=True)
    write_shards(folder, tensors, 1 << 62)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["w1"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def copy_seconds(source: Path, target: Path) -> float:
    """Time of a plain copy, synced."""
    start = time.perf_counter()
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def stream(options: argparse.Namespace) -> None:
    """Peak memory and speed of an export, against a copy of the same bytes."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source = folder / "source"
        write_synthetic(
            source, int(options.gigabytes * 1e9), options.experts, options.rank, options.form
        )
        file = source / "adapter_model.safetensors"
        size = file.stat().st_size
        path = os.pathsep.join([*sys.path[:2], str(ROOT / "scripts")])
        words = [str(file), str(folder / "out"), options.consumer, str(options.repeats)]
        result = subprocess.run(
            [sys.executable, "-c", ROUNDS, *words],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    bare, imported, peak, copies, exports = json.loads(result.stdout.splitlines()[-1])
    print(f"adapter: {size / 1e9:.2f} GB, {options.form}, exported for {options.consumer}")
    print(
        f"peak: {(peak - bare) / 1e6:.0f} MB above the bare interpreter, "
        f"{(peak - imported) / 1e6:.0f} MB above its imports"
    )
    shares = [copied / exported for copied, exported in zip(copies, exports, strict=True)]
    print(
        f"speed: {size / median(exports) / 1e6:.0f} MB/s, a plain copy "
        f"{size / median(copies) / 1e6:.0f} MB/s: {100 * median(shares):.0f} % of it "
        f"(medians of {options.repeats}, {100 * min(shares):.0f} to {100 * max(shares):.0f} %)"
    )


def merge(options: argparse.Namespace) -> None:
    """What a re-quantised merge loses: in the weights of all experts, and in the loss."""
    import torch

    import k3tune
    from k3tune.lora.export.factors import open_source
    from k3tune.lora.export.merging import measure_merge, merge_into
    from k3tune.lora.export.probe import probe_ids
    from k3tune.lora.read import FactorReader

    def load():
        return k3tune.load_base(options.base, dtype=torch.float32, kernels=options.kernels)

    def mean_loss(model) -> float:
        with torch.no_grad():
            losses = [
                (model(input_ids=ids, labels=labels).loss.item(), int((labels != -100).sum()))
                for ids, labels in rows
            ]
        return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)

    base = load()
    if options.ids is None:
        rows = [(row[None], row[None]) for row in probe_ids(base.config.text_config.vocab_size)]
    else:
        rows = [read_row(line) for line in options.ids.read_text().splitlines()]
    before = mean_loss(base)
    adapted_model = k3tune.load_adapter(base, options.adapter)
    adapted = mean_loss(adapted_model)
    without = mean_loss_without_experts(adapted_model, mean_loss)
    with FactorReader() as reader:
        adapter = open_source(options.adapter, options.base, reader)
        weights = measure_merge(adapter, Path(options.base), None)
        merge_into(adapted_model, adapter)
    merged = mean_loss(adapted_model)
    if weights is not None:
        print(weights.sentence())
    print(
        f"loss: base {before:.4f}, adapter {adapted:.4f}, adapter without the experts' part "
        f"{without:.4f}, merged and re-quantised {merged:.4f}"
    )
    for part, start in (
        ("all the adapter gains", before),
        ("what its experts' part gains", without),
    ):
        if start != adapted:
            print(f"of {part}, a merge loses {(merged - adapted) / (start - adapted):.1%}")


def mean_loss_without_experts(model, mean_loss) -> float:
    """The loss with the experts' factors set to zero, and set back afterwards."""
    from k3tune.lora.inject import active_adapter, adapter_layers
    from k3tune.lora.layers import LoraPackedProjection

    name = active_adapter(model)
    layers = adapter_layers(model, name).values()
    factors = [
        layer.factor(name, "B").data for layer in layers if isinstance(layer, LoraPackedProjection)
    ]
    kept = [factor.clone() for factor in factors]
    for factor in factors:
        factor.zero_()
    loss = mean_loss(model)
    for factor, value in zip(factors, kept, strict=True):
        factor.copy_(value)
    return loss


def read_row(line: str):
    """Ids and labels ``[1, T]`` of a line."""
    import torch

    content = json.loads(line)
    row = content if isinstance(content, dict) else {"input_ids": content, "labels": content}
    return torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    streamed = commands.add_parser("stream")
    streamed.add_argument("--gigabytes", type=float, default=2.0)
    streamed.add_argument("--experts", type=int, default=896)
    streamed.add_argument("--rank", type=int, default=32)
    streamed.add_argument("--form", choices=["per_expert", "shared_outer"], default="per_expert")
    streamed.add_argument("--consumer", choices=["peft", "vllm", "sglang"], default="vllm")
    streamed.add_argument("--repeats", type=int, default=9)
    streamed.add_argument("--folder", help="where the files go; default the temporary folder")
    streamed.set_defaults(run=stream)
    merging = commands.add_parser("merge")
    merging.add_argument("adapter")
    merging.add_argument("base")
    merging.add_argument("--ids", type=Path)
    merging.add_argument("--kernels", default="auto")
    merging.set_defaults(run=merge)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    chosen.run(chosen)
