"""TRL's GRPO trainer with its private hooks turned into named ones: all of them are in this file.

Written against TRL 1.16, which a test names. ``use_vllm`` stays False. With aligned steps TRL then
passes no old log-probabilities: those of the forward that trains, detached, are the old policy, and
what the monitor reads. The weight for the difference to the policy that sampled enters through the
advantages, which every loss of TRL's multiplies with: min(c A w, clip(c) A w) = w min(c A, clip(c)
A) for w >= 0.

Shape letters: ``B`` samples of a batch, ``P`` tokens of the longest prompt, ``C`` of the longest
completion.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from trl import GRPOConfig, GRPOTrainer

from k3tune.data.answers import Answer, read_answer
from k3tune.rl.objective import TokenWeights
from k3tune.rl.prompts import SAMPLE
from k3tune.rl.rollout import Rollout
from k3tune.rl.routing import RoutingTap, replayed_experts

_PLACE = "rollout_place"
_IMAGES = ("image", "images")
# TRL's name: what the log calls it
_RENAMED = {
    "frac_reward_zero_std": "zero_std_groups",
    "completions/mean_length": "completion_tokens",
    "completions/clipped_ratio": "truncated_fraction",
}


class Drawn(NamedTuple):
    """The samples of one generation, in the order they were asked for."""

    rollouts: list[Rollout]
    sample_ids: list[int]


@dataclass(frozen=True)
class Scored:
    """What one forward says of completions; tensors without gradient.

    Attributes:
        rollouts: the samples, in the batch's order.
        sample_ids: of their rows of the data.
        advantages: ``[B]``.
        logprobs: ``[B, C]`` of the sampled tokens, by the policy that counts as old.
        sampled: ``[B, C]``, as the engine gave them.
        mask: ``[B, C]``, tokens that count.
        entropies: ``[B, C]``.
        tap: experts of the forward.
        prompt_tokens: ``P``.
        completion_ids: ``[B, C]``.
    """

    rollouts: Sequence[Rollout]
    sample_ids: Sequence[int]
    advantages: Tensor
    logprobs: Tensor
    sampled: Tensor
    mask: Tensor
    entropies: Tensor
    tap: RoutingTap
    prompt_tokens: int
    completion_ids: Tensor


class HookedGRPOTrainer(GRPOTrainer):
    """A subclass fills in :meth:`sample`, :meth:`rewarding` and :meth:`weigh`.

    Attributes:
        routing_replay: whether the forward that trains uses the rollouts' experts.
        thinking: whether chats are rendered in K3's thinking mode.
    """

    # transformers types these for trainers of every kind
    args: GRPOConfig
    model: Any
    processing_class: Any

    routing_replay: bool = False
    thinking: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # by whether the model was training: an evaluation must not replace a step's samples
        self._drawn: dict[bool, Drawn] = {}
        self._rows: list[dict[str, Any]] = []
        self._replies: list[Answer | None] = []
        self._forward: tuple[Tensor, Tensor, Tensor | None] | None = None
        super().__init__(*args, **kwargs)

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
        """Sample a completion for each prompt.

        Args:
            prompts: token ids, each as often as it has samples.
        """
        raise NotImplementedError

    def rewarding(self, completions: Sequence[Any]) -> AbstractContextManager[None]:
        """Around the rewards of the samples that were just drawn.

        Args:
            completions: what rewards get: a list with one message, or a text.
        """
        raise NotImplementedError

    def weigh(self, scored: Scored) -> TokenWeights:
        """Weights for the loss of each token, once the forward that trains has run."""
        raise NotImplementedError

    def count(self, name: str, value: float) -> None:
        """Add to a metric of the next log: a mean over its steps."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    @property
    def sample_ids(self) -> list[int]:
        """Rows of the data that the last samples belong to."""
        return [row["sample_id"] for row in self._rows]

    @property
    def micro_steps(self) -> int:
        """Batches trained on so far, which TRL finds its place among the samples by."""
        step: int = self._step
        return step

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._step = value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics under the names of :mod:`k3tune.run_log`."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in list(metrics):
            metrics[_log_name(name)] = metrics.pop(name)
        super().log(logs, start_time)

    # ---- private hooks of TRL 1.16 ----

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        """TRL's draws the epochs' orders one after another, so a resumed run would start anew."""
        return EpochSampler(super()._get_train_sampler(dataset), self.args.seed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = _unpacked(inputs)
        output = super()._generate_and_score_completions(self._rows)
        # TRL shuffles and splits what it returns
        output[_PLACE] = torch.arange(len(inputs))
        return output

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [row["input_ids"] for row in self._rows], None, {}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        rollouts = self.sample(prompt_ids)
        self._drawn[self.model.training] = Drawn(rollouts, self.sample_ids)
        return (
            [list(rollout.completion_ids) for rollout in rollouts],
            [list(rollout.logprobs) for rollout in rollouts],
        )

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL decodes a completion as one text; a chat's is read channel by channel."""
        ids, completion_ids, tool_mask, completions, *rest = super()._generate(prompts)
        self._replies = [None] * len(prompts)
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, list):
                reply = read_answer(
                    completion_ids[place], self.processing_class, thinking=self.thinking
                )
                self._replies[place] = reply
                completions[place] = [reply.message]
            elif isinstance(completions[place], list):
                # TRL takes all of a batch for chats where its first prompt is one
                completions[place] = completions[place][0]["content"]
        return (ids, completion_ids, tool_mask, completions, *rest)

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        rows = [{**row, "replies": reply} for row, reply in zip(inputs, self._replies, strict=True)]
        for row in rows:
            del row["input_ids"]
        with self.rewarding(completions):
            rewards: Tensor = super()._calculate_rewards(
                rows, prompts, completions, completion_ids_list
            )
        return rewards

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The forward of this batch, where it has run already."""
        if self._forward is not None:
            return self._forward
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        drawn = self._drawn[self.model.training]
        places = inputs[_PLACE].tolist()
        rollouts = [drawn.rollouts[place] for place in places]
        forward, tap = self.forward(model, rollouts, inputs)
        old = inputs.get("old_per_token_logps", forward[0])
        scored = Scored(
            rollouts,
            [drawn.sample_ids[place] for place in places],
            inputs["advantages"],
            old.detach(),
            inputs["sampling_per_token_logps"],
            inputs["completion_mask"],
            forward[1].detach(),
            tap,
            inputs["prompt_mask"].shape[1],
            inputs["completion_ids"],
        )
        weights_BC = self.weigh(scored).weights
        self._forward = forward
        try:
            weighted = {**inputs, "advantages": inputs["advantages"].unsqueeze(1) * weights_BC}
            loss: Tensor = super()._compute_loss(model, weighted)
        finally:
            self._forward = None
        return loss

    def forward(
        self,
        model: nn.Module,
        rollouts: Sequence[Rollout],
        inputs: dict[str, Any],
        *,
        replay: bool | None = None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], RoutingTap]:
        """Run prompts and completions as the trainer does.

        Args:
            model: wrapped or not.
            rollouts: the batch's samples.
            inputs: ``prompt_ids``, ``prompt_mask``, ``completion_ids``, ``completion_mask``.
            replay: use the rollouts' experts; None does as the run.

        Returns:
            Log-probabilities ``[B, C]`` of the sampling distribution, entropies, TRL's third value;
            and the experts.
        """
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].shape[1]
        tap = RoutingTap(self.accelerator.unwrap_model(model), mask)
        called: Any = model
        if self.routing_replay if replay is None else replay:
            called = _Replaying(model, replayed_experts(tap, rollouts, inputs["prompt_mask"], kept))
        with tap:
            forward = self._get_per_token_logps_and_entropies(
                called, input_ids, mask, kept, compute_entropy=True
            )
        return forward, tap


class EpochSampler(Sampler[int]):
    """TRL's sampler, each epoch in an order of seed and epoch alone."""

    def __init__(self, sampler: Any, seed: int) -> None:
        """Around TRL's.

        Args:
            sampler: TRL's ``RepeatSampler``.
            seed: of the run.
        """
        self._sampler = sampler
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at an epoch's start."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._seed + self._epoch)
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _Replaying:
    """A model whose routers are given their experts."""

    def __init__(self, model: nn.Module, routing: dict[int, Tensor]) -> None:
        self._model, self._routing = model, routing

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs, routing=self._routing)


def _unpacked(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the data with all their columns; TRL asks each row for the first one's."""
    samples = [json.loads(row[SAMPLE]) for row in inputs]
    names = {name: None for sample in samples for name in sample if name not in _IMAGES}
    return [
        {
            **{name: sample.get(name) for name in names},
            "input_ids": row["input_ids"],
            "sample_id": row["sample_id"],
        }
        for row, sample in zip(inputs, samples, strict=True)
    ]


def _log_name(name: str) -> str:
    if name.startswith("rewards/"):
        reward, _, statistic = name.removeprefix("rewards/").rpartition("/")
        return f"reward/{reward}" if statistic == "mean" else f"reward_{statistic}/{reward}"
    return _RENAMED.get(name, name)
