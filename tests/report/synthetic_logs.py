"""Logs of runs that never ran: the fields and the shapes of real ones, seeded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k3tune.monitor.record import PROBABILITY_EDGES, R_EDGES, SURPRISE_EDGES

BEGUN = 1_800_000_000.0
STEP_S = 2.5
FLOOR_K3 = 4.1e-7
_TOKENS = 2048

FAULTS = {
    "stale adapter": ("above floor", "the samples are of version {old}, the trainer is at {new}"),
    "temperature": ("above floor", "the engine's distribution fits the trainer's at 1.10"),
    "top-p": ("above floor", "the engine's probabilities sum up within the top 95 % of the mass"),
    "off-by-one": ("above floor", "the engine's logprobs fit those of the next token"),
    "adapter scale": ("above floor", "the engine moved 2.0 times as far as the trainer"),
    "expert": ("drifting", "the excess sits in the tokens of expert 7 of layer 3"),
    "routing flips": ("drifting", "1.0 % of (token, layer) go to other experts"),
}
"""Causes a run can be given, with the verdict they bring and the monitor's sentence."""


@dataclass
class Scenario:
    """What a run does.

    Attributes:
        steps: optimizer steps it is logged for.
        fault: one of :data:`FAULTS` from ``fault_step`` on; None for a clean run.
        calibrated: whether it has a floor.
        layers: MoE layers.
        text: of the worst token of every step.
        end: reason of the end record; None for a run that goes on or crashed.
    """

    steps: int = 120
    fault: str | None = None
    fault_step: int = 80
    calibrated: bool = True
    layers: int = 6
    text: str = " seven"
    end: str | None = "finished"
    seed: int = 0
    reward_from: float = 0.34
    reward_to: float = 0.62
    options: dict[str, Any] = field(default_factory=dict)


def grpo_records(scenario: Scenario) -> list[dict[str, Any]]:
    """Records of a GRPO run, in the order they are written."""
    rng = np.random.default_rng(scenario.seed)
    records = [_record("run", 0, _start())]
    if scenario.calibrated:
        records.append(_record("floor", 0, _floor(rng)))
    for step in range(1, scenario.steps + 1):
        faulty = scenario.fault is not None and step >= scenario.fault_step
        size = 40.0 if faulty else 1.0
        records.append(_record("mismatch", step, _mismatch(rng, scenario, step, size)))
        records.append(_record("worst", step, _worst(rng, scenario, step, size)))
        if faulty and step < scenario.fault_step + 3:
            records.append(_record("alarm", step, _alarm(scenario, step)))
        records.append(_record("train", step, _grpo_train(rng, scenario, step)))
    if scenario.end:
        records.append(_record("end", scenario.steps, {"reason": scenario.end}))
    return records


def sft_records(steps: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Records of an SFT run with an evaluation every 20 steps."""
    rng = np.random.default_rng(seed)
    records = [_record("run", 0, _start())]
    for step in range(1, steps + 1):
        values = _machine(rng, step, layers=4)
        loss = 2.1 * step**-0.25 + rng.normal(0, 0.02)
        values |= {"loss": loss, "entropy": 0.8 * loss, "mean_token_accuracy": 1 - loss / 3}
        records.append(_record("train", step, values))
        if step % 20 == 0:
            records.append(_record("eval", step, {"eval_loss": loss + 0.05, "eval_runtime": 1.5}))
    records.append(_record("end", steps, {"reason": "finished", "train_loss": 1.0}))
    return records


def write_run(folder: Path, records: list[dict[str, Any]], cut: bool = False) -> Path:
    """Write records as a run's log; ``cut`` ends it in the middle of a line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "run_log.jsonl").write_text(text[: -len(text.splitlines()[-1]) // 2] if cut else text)
    return folder


def write_long_run(folder: Path, steps: int, layers: int = 24) -> Path:
    """A log of many steps, fast: most of a record is one of a few texts."""
    records = [record for record in grpo_records(Scenario(steps=16, layers=layers, end=None))]
    start, rest = records[:2], records[2:]
    templates = [json.dumps(record) for record in rest]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run_log.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in start)
        for step in range(1, steps + 1):
            place = 3 * (step % 16)
            for record, template in zip(
                rest[place : place + 3], templates[place : place + 3], strict=True
            ):
                old = f'"time": {record["time"]}, "step": {record["step"]},'
                new = f'"time": {BEGUN + STEP_S * step}, "step": {step},'
                file.write(template.replace(old, new, 1) + "\n")
    return folder


def _record(kind: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
    head = {"schema": 1, "kind": kind, "time": BEGUN + STEP_S * step, "step": step}
    return head | {
        name: float(f"{value:.9g}") if isinstance(value, float) else value
        for name, value in values.items()
    }


def _start() -> dict[str, Any]:
    versions = {"python": "3.11.7", "torch": "2.13.0", "trl": "1.16.0"}
    return {"config_sha256": "0" * 64, "versions": versions, "git_commit": "f" * 40,
            "resumed_from": None, "processes": 1, "device": "cpu"}  # fmt: skip


def _interval(value: float, width: float = 0.12) -> dict[str, float]:
    return {"value": value, "low": value * (1 - width), "high": value * (1 + width)}


def _floor(rng: np.random.Generator) -> dict[str, Any]:
    parts = {"same_path": 0.1, "decode_prefill": 0.3, "mxfp8": 0.8, "routing": 0.05}
    return {
        "k3": _interval(FLOOR_K3),
        "k3_token_mean": _interval(FLOOR_K3 * 1.05),
        "abs_mean": _interval(5.2e-4),
        "num_prompts": 64, "num_samples": 256, "num_tokens": 16384,
        "key": {"engine": "local fp32", "trainer": "fp32", "base": "ab" * 32, "sampling": "T=1"},
        "parts": {name: _interval(FLOOR_K3 * share, 0.2) for name, share in parts.items()}
        | {"adapter_rounding": None},
        "router_mismatch": _interval(1e-4),
        "by_probability": _by_probability(rng, 1.0),
        "reused": False, "not_reused": None, "alarm_rate": 1e-4,
    }  # fmt: skip


def _mismatch(
    rng: np.random.Generator, scenario: Scenario, step: int, size: float
) -> dict[str, Any]:
    k3 = FLOOR_K3 * size * float(rng.lognormal(0, 0.06))
    spread = (2 * k3) ** 0.5
    faulty = size > 1
    verdict, text = "at floor", None
    if not scenario.calibrated:
        verdict = "not calibrated"
    elif faulty:
        verdict, text = FAULTS[scenario.fault or ""]
        text = text.format(old=step - 2, new=step - 1)
    stale = faulty and scenario.fault == "stale adapter"
    flips = 0.01 if faulty and scenario.fault == "routing flips" else 1e-4
    layers = np.linspace(0.5, 1.5, scenario.layers) * flips * rng.lognormal(0, 0.1, scenario.layers)
    r = rng.normal(0, spread, _TOKENS)
    moved = 0.02 * (1 - 0.97**step)
    return {
        "verdict": verdict,
        "excess": (k3 - FLOOR_K3) if scenario.calibrated else None,
        "excess_ratio": k3 / FLOOR_K3 if scenario.calibrated else None,
        "attribution": scenario.fault if faulty and scenario.calibrated else None,
        "attribution_text": text,
        "evidence": {"temperature": 1.1} if faulty else None,
        "ewma": float(rng.normal(0, 0.3)) + 9 * faulty, "ewma_limit": 3.1,
        "cusum": abs(float(rng.normal(0.5, 0.5))) + 12 * faulty, "cusum_limit": 8.0,
        "adapter_version": step - 1, "version_lag": int(stale), "stale_samples": 16 * stale,
        "num_samples": 32, "num_tokens": _TOKENS, "nan_count": 0, "clamp_count": 0,
        "clamp_count_sequence": 0, "masked_fraction": 0.002 * faulty,
        "truncated_fraction": 0.001 + 0.02 * faulty,
        "k3": k3, "k3_token_mean": k3 * 1.04, "k1": k3 * 0.9, "k2": k3,
        "abs_mean": float(np.abs(r).mean()), "abs_p95": float(np.quantile(np.abs(r), 0.95)),
        "abs_max": float(np.abs(r).max()),
        "is_mean": float(np.exp(r).mean()), "is_min": float(np.exp(r).min()),
        "is_max": float(np.exp(r).max()), "is_out_of_bounds": 0.0,
        "ess": 1 - spread**2, "ess_sequence": 1 - 8 * spread**2,
        "router_mismatch": float(layers.mean()), "router_mismatch_tokens": float(layers.sum()),
        "router_mismatch_layers": layers.tolist(),
        "histogram": np.histogram(r, [-np.inf, *R_EDGES, np.inf])[0].tolist(),
        "scatter": _scatter(rng, spread),
        "by_probability": _by_probability(rng, size**0.5),
        "by_position": _buckets(rng, 7, k3, "tokens"),
        "by_length": _buckets(rng, 7, k3, "samples"),
        "canary": {
            "verdict": "engine did not move" if stale else "moved together",
            "engine_moved": moved * (0.9 if stale else 1.0), "trainer_moved": moved,
            "engine_step": 4e-4, "trainer_step": 4e-4, "difference": 3e-5 * size,
            "floor": 3e-5, "scale": 1.0, "scale_fit": 0.999,
        },
    }  # fmt: skip


def _scatter(rng: np.random.Generator, spread: float) -> list[list[int]]:
    rollout = rng.exponential(0.4, _TOKENS) ** 2
    train = np.maximum(rollout + rng.normal(0, spread, _TOKENS), 0)
    cells = np.zeros((len(SURPRISE_EDGES), len(SURPRISE_EDGES)), dtype=int)
    places = (np.searchsorted(SURPRISE_EDGES, side, "right") - 1 for side in (train, rollout))
    np.add.at(cells, tuple(places), 1)
    return [[int(i), int(j), int(cells[i, j])] for i, j in np.argwhere(cells)]


def _by_probability(rng: np.random.Generator, size: float) -> dict[str, Any]:
    count = len(PROBABILITY_EDGES) - 1
    tokens = rng.integers(10, 400, count)
    tokens[0] = 0
    mean = 1e-3 * size * np.linspace(2, 0.1, count) * rng.lognormal(0, 0.1, count)
    known = [float(value) if n else None for value, n in zip(mean, tokens, strict=True)]
    return {"tokens": tokens.tolist(), "abs_mean": known,
            "k3": [value and value**2 / 2 for value in known]}  # fmt: skip


def _buckets(rng: np.random.Generator, count: int, k3: float, weight: str) -> dict[str, Any]:
    values = k3 * rng.lognormal(0, 0.2, count)
    return {weight: rng.integers(1, 200, count).tolist(), "k3": values.tolist()}


def _worst(rng: np.random.Generator, scenario: Scenario, step: int, size: float) -> dict[str, Any]:
    tokens = []
    for rank in range(4):
        r = float(rng.choice([-1, 1]) * 5e-3 * size**0.5 / (rank + 1))
        logp = -float(rng.exponential(2.0))
        tokens.append({
            "sample": int(rng.integers(32)), "prompt": int(rng.integers(8)),
            "position": int(rng.integers(60)), "token_id": int(rng.integers(800)),
            "text": scenario.text if rank == 0 else " of", "context": "The sum of 3 and 4 is\n",
            "logp_train": logp, "logp_rollout": logp - r, "r": r,
        })  # fmt: skip
    return {"tokens": tokens}


def _alarm(scenario: Scenario, step: int) -> dict[str, Any]:
    text = FAULTS[scenario.fault or ""][1].format(old=step - 2, new=step - 1)
    return {"alarm": "kl", "cause": scenario.fault, "text": text, "value": 1.6e-5, "limit": 5e-7}


def _grpo_train(rng: np.random.Generator, scenario: Scenario, step: int) -> dict[str, Any]:
    done = 1 - 0.5 ** (4 * step / max(scenario.steps, 1))
    reward = scenario.reward_from + (scenario.reward_to - scenario.reward_from) * done
    reward += float(rng.normal(0, 0.03))
    return _machine(rng, step, scenario.layers) | {
        "loss": float(rng.normal(0, 0.004)), "reward": reward, "reward_std": 0.38,
        "reward/correct": reward - 0.05, "reward/format": 0.05 + 0.9 * done,
        "zero_std_groups": max(0.0, 0.25 + float(rng.normal(0, 0.06))),
        "truncated_fraction": max(0.0, 0.12 - 0.1 * done + float(rng.normal(0, 0.01))),
        "completion_tokens": 58 - 12 * done + float(rng.normal(0, 1)),
        "entropy": 0.9 - 0.4 * done + float(rng.normal(0, 0.02)),
        "rollout_s": 1.3 + float(rng.normal(0, 0.05)), "reward_s": 0.04, "push_s": 0.02,
        "adapter_version": step,
    }  # fmt: skip


def _machine(rng: np.random.Generator, step: int, layers: int) -> dict[str, Any]:
    load = {f"router_load/{layer + 1}": 1.4 + 0.1 * layer + float(rng.normal(0, 0.05))
            for layer in range(layers)}  # fmt: skip
    return {
        "mfu": None, "learning_rate": 2e-3 * min(1, step / 10),
        "grad_norm": 0.8 + 0.1 * rng.random(),
        "grad_norm/experts": 0.6 + 0.1 * rng.random(), "grad_norm/attention": 0.3,
        "num_tokens": 3000.0 * step, "tokens": 3000.0, "trained_tokens": 2048.0,
        "tokens_per_s": 1200 + float(rng.normal(0, 30)), "peak_memory_bytes": 912_000_000,
        "data_s": 0.01, "forward_backward_s": 0.95 + float(rng.normal(0, 0.03)),
        "optimizer_s": 0.08, "epoch": 0.01 * step, **load, "router_load": max(load.values()),
    }  # fmt: skip
