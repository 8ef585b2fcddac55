"""Engine and trainer over k3-nano, in any numerics, with any one fault between them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import k3tune
from k3tune.data.chat import render_chat
from k3tune.data.tokenizer import K3Tokenizer
from k3tune.lora import (
    LoraSpec,
    adapter_gradients,
    adapter_parameters,
    adapter_state,
    attach_lora,
)
from k3tune.model.scoring import score_rows
from k3tune.monitor.canary import Canary, choose_canaries
from k3tune.monitor.routing import smallest_overlap
from k3tune.monitor.samples import Samples, make_samples
from k3tune.rl.engines.local import LocalEngine
from k3tune.rl.numerics import activation_rounding
from k3tune.rl.rollout import Rollout, Sampling
from nano_tasks import draw_problems, messages, worked_reply

BASE = Path(k3tune.__file__).parent / "assets" / "k3-nano"
GROUPS = ("attention", "latent", "experts", "shared_experts", "dense")
FAULTS = (
    "stale",
    "scale",
    "expert",
    "temperature",
    "trainer temperature",
    "top-p",
    "off-by-one",
    "flips",
)
FLIPPED = 0.01
_LEARNING_RATE = 1e-3

Row = tuple[list[int], list[int]]


class NanoLab:
    """One base, an adapter that grows from version to version, an engine and a trainer.

    Args:
        dtype: of the base.
        engine, trainer: what each side rounds the experts' inputs to.
        expert: MoE layer and expert whose factors the fault ``expert`` zeroes.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        engine: str = "none",
        trainer: str = "none",
        expert: tuple[int, int] = (1, 9),
    ) -> None:
        self.base = k3tune.load_base(BASE, dtype=dtype)
        spec = LoraSpec(targets=GROUPS, rank=8, alpha=16)
        self.model = attach_lora(self.base, spec)
        self.model.eval()
        self.rounding = {"engine": engine, "trainer": trainer}
        self.expert = expert
        self.tokenizer = K3Tokenizer.from_pretrained(BASE)
        self._canary_rows: list[Row] = []
        self._updates: list[dict[str, Tensor]] = []

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Sums to answer, in chat markup."""
        problems = draw_problems("chain_sum", "rl", count, seed)
        return [
            render_chat(messages(p), self.tokenizer, add_generation_prompt=True).input_ids
            for p in problems
        ]

    def adapter(self, version: int) -> dict[str, Tensor]:
        """The trainer's adapter after so many updates; B is 0 at version 0."""
        while len(self._updates) < version:
            self._updates.append(self._update(len(self._updates)))
        state = adapter_state(self.model)
        for key in state:
            if ".lora_B" in key:
                parts = [update[key] for update in self._updates[:version]]
                state[key] = sum(parts, torch.zeros_like(state[key]))
        return state

    def _update(self, number: int) -> dict[str, Tensor]:
        """What AdamW's first step makes of a gradient: as long in every value, towards answers."""
        replies = random.Random(number)
        rows, labels = [], []
        for problem in draw_problems("chain_sum", "rl", 8, 500 + number):
            chat = messages(problem, worked_reply(replies, problem, 0.0))
            row = render_chat(chat, self.tokenizer)
            rows.append(torch.tensor(row.input_ids))
            labels.append(torch.where(torch.tensor(row.assistant_mask) > 0, rows[-1], -100))
        ids = pad_sequence(rows, batch_first=True)
        targets = pad_sequence(labels, batch_first=True, padding_value=-100)
        self._load_trainer(0)
        self.model.zero_grad()
        self.base(input_ids=ids, labels=targets, use_cache=False).loss.backward()
        gradients = adapter_gradients(self.model)
        self.model.zero_grad()
        return {
            key: -_LEARNING_RATE * gradient / (gradient.abs() + 1e-8)
            for key, gradient in gradients.items()
            if ".lora_B" in key
        }

    def step(
        self,
        fault: str | None,
        version: int,
        prompts: Sequence[list[int]],
        *,
        each: int,
        seed: int,
    ) -> Samples:
        """Sample with the engine, score with the trainer."""
        rollouts = self.sample(fault, version, prompts, each=each, seed=seed)
        return self.compare(fault, rollouts, each, version)

    def sample(
        self,
        fault: str | None,
        version: int,
        prompts: Sequence[list[int]],
        *,
        each: int,
        seed: int,
    ) -> list[Rollout]:
        """Completions of the engine."""
        engine = self._engine(fault, version)
        sampling = Sampling(
            max_new_tokens=64,
            temperature=1.1 if fault == "temperature" else 1.0,
            top_p=0.95 if fault == "top-p" else 1.0,
        )
        repeated = [prompt for prompt in prompts for _ in range(each)]
        seeds = [seed * 1_000_003 + number for number in range(len(repeated))]
        return engine.generate(repeated, sampling, seeds)

    def compare(
        self, fault: str | None, rollouts: Sequence[Rollout], each: int, version: int
    ) -> Samples:
        """Both sides' arrays of these rollouts."""
        self._load_trainer(version)
        rows = [(list(x.prompt_ids), list(x.completion_ids)) for x in rollouts]
        trained = self.score(rows, 1.1 if fault == "trainer temperature" else 1.0)
        sampled = [torch.tensor(x.logprobs, dtype=torch.float64) for x in rollouts]
        routed = [x.routed_experts.long() for x in rollouts]
        if fault == "off-by-one":
            sampled = [torch.roll(row, -1) for row in sampled]
        if fault == "flips":
            routed = [_flipped(row, number) for number, row in enumerate(routed)]
            sampled = self.score(rows, replay=routed, side="engine")["logprobs"]
        first = [len(prompt) - 1 for prompt, _ in rows]
        prompt_overlap = [
            smallest_overlap(ours[:n].numpy(), theirs[:n].numpy())
            for ours, theirs, n in zip(trained["experts"], routed, first, strict=True)
        ]
        completions = [
            [x[n:] for x, n in zip(side, first, strict=True)]
            for side in (trained["experts"], routed)
        ]
        return make_samples(
            _padded(trained["logprobs"]),
            _padded(sampled),
            _padded([torch.ones(len(completion)) for _, completion in rows]),
            np.arange(len(rows)) // each,
            [version] * len(rows),
            token_ids=_padded([torch.tensor(completion) for _, completion in rows]),
            entropy=_padded(trained["entropies"]),
            train_experts=_padded(completions[0], -1),
            rollout_experts=_padded(completions[1], -1),
            prompt_overlap=prompt_overlap,
        )

    @torch.no_grad()
    def score(
        self,
        rows: Sequence[Row],
        temperature: float = 1.0,
        *,
        replay: Sequence[Tensor] | None = None,
        side: str = "trainer",
    ) -> dict[str, list[Tensor]]:
        """Log-probabilities and entropies of completions, experts of all predicting tokens."""
        whole = [torch.tensor([*prompt, *completion]) for prompt, completion in rows]
        ids = pad_sequence([row[:-1] for row in whole], batch_first=True)
        experts = None if replay is None else _by_layer(replay, ids.shape[1])
        with activation_rounding(self.base, self.rounding[side]):
            output = self.base(input_ids=ids, use_cache=False, output_routing=True, routing=experts)
        logprobs = (output.logits.float() / temperature).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        routed = torch.stack([output.routing[n].expert_ids for n in sorted(output.routing)], 2)
        found: dict[str, list[Tensor]] = {"logprobs": [], "entropies": [], "experts": []}
        for number, (prompt, completion) in enumerate(rows):
            places = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
            chosen = torch.tensor(completion)[:, None]
            found["logprobs"].append(logprobs[number, places].gather(-1, chosen)[:, 0])
            found["entropies"].append(entropies[number, places])
            found["experts"].append(routed[number, : places.stop])
        return found

    def make_canary(self, samples: Samples, prompts: Sequence[list[int]], each: int) -> Canary:
        """Pin the samples of a calibration that tell most."""
        assert samples.token_ids is not None
        self._canary_rows = [
            (prompts[row // each], samples.token_ids[row][samples.mask[row]].tolist())
            for row in choose_canaries(samples)
        ]
        return Canary(*self.canary_scores(None, 0))

    def canary_scores(self, fault: str | None, version: int) -> tuple[list[float], list[float]]:
        """The engine's and the trainer's, the trainer's under the engine's numerics."""
        self._load_trainer(version)
        whole = [[*prompt, *completion] for prompt, completion in self._canary_rows]
        with torch.no_grad(), activation_rounding(self.base, self.rounding["engine"]):
            scored = score_rows(self.base, whole, batch_size=len(whole))
        trainer = [
            value
            for row, (prompt, _) in zip(scored, self._canary_rows, strict=True)
            for value in row[len(prompt) :]
            if value is not None
        ]
        engine = self._engine(fault, version).score(self._canary_rows)
        return [value for row in engine for value in row], trainer

    def _load_trainer(self, version: int) -> None:
        state = self.adapter(version)
        with torch.no_grad():
            for group in adapter_parameters(self.model).values():
                for name, factor in group.items():
                    key = next(key for key in state if f".{name}." in key)
                    factor.copy_(state[key])

    def _engine(self, fault: str | None, version: int) -> LocalEngine:
        engine = LocalEngine(self.model, activations=self.rounding["engine"], return_routing=True)
        state = self.adapter(version - 1 if fault == "stale" else version)
        layer, expert = self.expert
        for key in state:
            if ".lora_B" in key and fault == "scale":
                state[key] = 2 * state[key]
            if f"layers.{layer}.block_sparse_moe.experts." in key and fault == "expert":
                state[key][expert] = 0
        if version:
            engine.load_adapter(version, state)
        return engine


def _flipped(experts_TLA: Tensor, seed: int) -> Tensor:
    """At some tokens other experts, drawn at random, in all layers."""
    drawing = torch.Generator().manual_seed(seed)
    tokens, layers, active = experts_TLA.shape
    chosen = torch.rand(tokens, generator=drawing) < FLIPPED
    drawn = torch.rand(tokens, layers, 32, generator=drawing).argsort(-1)[..., :active]
    return torch.where(chosen[:, None, None], drawn, experts_TLA)


def _by_layer(experts: Sequence[Tensor], length: int) -> dict[int, Tensor]:
    """Replay ``[B, T, A]`` by layer; padding takes the first experts."""
    layers, active = experts[0].shape[1:]
    whole = torch.arange(active).expand(len(experts), length, layers, active).clone()
    for number, row in enumerate(experts):
        whole[number, : len(row)] = row
    # the first layer is dense
    return {layer + 1: whole[:, :, layer] for layer in range(layers)}


def _padded(rows: Sequence[Any], fill: float = 0) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=fill)
