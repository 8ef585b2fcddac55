"""How the train-rollout KL of equal weights grows with depth, up to K3's 93 layers.

    python scripts/floor_by_depth.py [--depths 6 12 24 48 93] [--json FILE]

Narrow random models with K3's layer pattern (an MLA layer after every three KDA layers and at the
end, a dense first layer, an attention-residual block every 12 layers, 32 experts with 4 active)
sample with caches and score the same tokens in one forward. Random weights say how rounding grows,
not how large it is in a trained model: its router has more near ties and its tokens more entropy.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from k3tune.model import K3ForCausalLM, load_base
from k3tune.monitor import Floor
from k3tune.monitor.samples import Samples, make_samples
from k3tune.rl.engines.local import LocalEngine
from k3tune.rl.numerics import activation_rounding
from k3tune.rl.rollout import Rollout, Sampling

# random checkpoints of any shape are made by what the tests make theirs with
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from checkpoints import build_checkpoint

DEPTHS = (6, 12, 24, 48, 93)
# dtype, what the engine and what the trainer round the experts' inputs to, and whether the trainer
# uses the engine's experts
PAIRS = {
    "fp32": (torch.float32, "none", "none", False),
    "bf16": (torch.bfloat16, "none", "none", False),
    "bf16, routes replayed": (torch.bfloat16, "none", "none", True),
    "bf16, engine MXFP8": (torch.bfloat16, "mxfp8", "none", False),
    "the same, routes replayed": (torch.bfloat16, "mxfp8", "none", True),
    "bf16, both MXFP8": (torch.bfloat16, "mxfp8", "mxfp8", False),
}
_PROMPT_TOKENS = 8
_SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "kda_num_heads": 3,
    "kda_head_dim": 32,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "attn_res_block_size": 12,
}


def mla_layers(depth: int) -> list[int]:
    """K3's pattern: every fourth layer, and the last (zero-based)."""
    return sorted({*range(3, depth, 4), depth - 1})


def settle(model: K3ForCausalLM, depth: int) -> K3ForCausalLM:
    """Give random weights the magnitudes of a trained model's start: what a layer adds to the
    residual stream shrinks with depth, and logits spread by about one nat."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")):
                weight.mul_((2 * depth) ** -0.5)
        model.lm_head.weight.mul_(0.5)
    return model


def sample(model: K3ForCausalLM, rounding: str, arguments: Any) -> list[Rollout]:
    """Completions of random prompts, all of one length."""
    drawing = torch.Generator().manual_seed(arguments.seed)
    vocabulary = model.model.architecture.vocab_size - 4
    prompts = torch.randint(vocabulary, (arguments.prompts, _PROMPT_TOKENS), generator=drawing)
    rows = prompts.repeat_interleave(arguments.samples, dim=0).tolist()
    engine = LocalEngine(model, activations=rounding, return_routing=True)
    sampling = Sampling(max_new_tokens=arguments.tokens, stop_token_ids=())
    return engine.generate(rows, sampling, list(range(len(rows))))


def compare(
    model: K3ForCausalLM, rollouts: list[Rollout], rounding: str, replay: bool, each: int
) -> Samples:
    """Score the completions in one forward."""
    prompts, completions = (
        torch.tensor([getattr(rollout, field) for rollout in rollouts])
        for field in ("prompt_ids", "completion_ids")
    )
    ids = torch.cat([prompts, completions], dim=1)
    theirs = torch.stack([rollout.routed_experts for rollout in rollouts])
    layers = model.model.architecture.moe_layers
    experts = {layer: theirs[:, :, place].long() for place, layer in enumerate(layers)}
    with torch.no_grad(), activation_rounding(model, rounding):
        output = model(
            input_ids=ids[:, :-1],
            use_cache=False,
            output_routing=True,
            routing=experts if replay else None,
        )
    places = slice(_PROMPT_TOKENS - 1, None)
    logprobs = output.logits[:, places].float().log_softmax(-1)
    routed = torch.stack([output.routing[layer].expert_ids for layer in layers], dim=2)
    return make_samples(
        logprobs.gather(-1, completions[..., None])[..., 0],
        [rollout.logprobs for rollout in rollouts],
        torch.ones_like(completions),
        torch.arange(len(rollouts)) // each,
        [0] * len(rollouts),
        train_experts=routed[:, places],
        rollout_experts=theirs[:, places],
    )


def measure(depth: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a pair of numerics."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = build_checkpoint(
            Path(folder) / "base", num_hidden_layers=depth, mla_layers=mla_layers(depth), **_SHAPE
        )
        models: dict[torch.dtype, K3ForCausalLM] = {}
        sampled: dict[tuple[torch.dtype, str], list[Rollout]] = {}
        for name, (dtype, engine, trainer, replay) in PAIRS.items():
            if dtype not in models:
                models[dtype] = settle(load_base(path, dtype=dtype), depth)
            if (dtype, engine) not in sampled:
                sampled[dtype, engine] = sample(models[dtype], engine, arguments)
            samples = compare(
                models[dtype], sampled[dtype, engine], trainer, replay, arguments.samples
            )
            floor = Floor.calibrate(samples, key={})
            assert floor.router_mismatch is not None, "the engine returns its experts"
            rows.append(
                {
                    "depth": depth,
                    "numerics": name,
                    "k3": asdict(floor.k3),
                    "abs_mean": floor.abs_mean.value,
                    "router_mismatch": floor.router_mismatch.value,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a depth, a column a pair; k3, its interval, and the share routed apart."""
    lines = [
        f"| layers | {' | '.join(PAIRS)} |",
        f"|{'---|' * (len(PAIRS) + 1)}",
    ]
    for depth in sorted({row["depth"] for row in rows}):
        cells = [
            f"{row['k3']['value']:.1e} [{row['k3']['low']:.1e}, {row['k3']['high']:.1e}], "
            f"{row['router_mismatch']:.1%}"
            for row in rows
            if row["depth"] == depth
        ]
        lines.append(f"| {depth} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure how the KL floor grows with depth.")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = []
    for depth in arguments.depths:
        rows += measure(depth, arguments)
        print(f"{depth} layers, {time.monotonic() - started:.0f} s", flush=True)
    print(table(rows))
    print(f"load average {os.getloadavg()[0]:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
