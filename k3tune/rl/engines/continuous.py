"""Continuous sampling from a K3 model: finished rows leave the batch, waiting prompts enter it.

A step is one token for every row. Rows that run are decoded together, whatever their positions;
prompts that enter are prefilled and join them, and one that enters several times at once (samples
of one prompt) is prefilled once.

Shape letters: ``B`` rows, ``T`` tokens, ``L`` MoE layers, ``A`` active experts a token.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3tune.errors import RolloutError
from k3tune.model.latent_moe import Routing
from k3tune.model.modeling import K3ForCausalLM
from k3tune.model.rows import RowCache
from k3tune.rl.engines.draw import RowSampling, draw, log_distribution, uniforms
from k3tune.rl.rollout import MAX_SEED, FinishReason, Sampling

# padded tokens of one prefill: bounds its activations
_PREFILL_TOKENS = 8192

KeepStepping = Callable[[bool], bool]
"""Asked before every forward of the model: whether this process has work -> whether any has."""


def alone(has_work: bool) -> bool:
    """The :data:`KeepStepping` of a process that steps for itself."""
    return has_work


class SampledToken(NamedTuple):
    """One token of one row.

    Attributes:
        key: as given to :meth:`ContinuousSampler.submit`.
        token_id: the token; a stop id is given like any other.
        logprob: of the distribution it was drawn from, in nats.
        finish_reason: set on a row's last token.
        routed_experts: int16 ``[T, L, A]``, of the tokens that were run for this one: the prompt's
            for a row's first, then the one token before; None unless asked for.
    """

    key: Hashable
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    routed_experts: Tensor | None = None


@dataclass
class _Row:
    """A prompt, how to go on with it, and how far it is."""

    key: Hashable
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    stops: frozenset[int]
    num_sampled: int = 0
    last_id: int = 0


class _Settings(NamedTuple):
    """What the rows that run are drawn with; made anew when one enters or leaves."""

    sampling: RowSampling
    seeds_B: Tensor
    filtered: bool


class _Forward(NamedTuple):
    """Logits of the next tokens, and the experts of the tokens that were run, a tensor a row."""

    logits_BV: Tensor
    routing: list[Tensor | None]


class ContinuousSampler:
    """Samples many prompts at once, each with its own settings, seed and key.

    A row's tokens depend on its prompt, settings and seed; the other rows change its logits by the
    rounding of a product at most. Weights, adapters and the training mode must stay as they are
    while rows run. After an error in :meth:`step` the sampler is not usable.

    Args:
        model: in eval mode, with adapters or without.
        max_batch_size: rows that run together at most.
        return_routing: give the experts of every token.
        keep_stepping: called before every forward of the model with True (see :func:`run_idle`).

    Raises:
        RolloutError: if ``max_batch_size`` is below 1.
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        *,
        max_batch_size: int = 64,
        return_routing: bool = False,
        keep_stepping: KeepStepping = alone,
    ) -> None:
        if max_batch_size < 1:
            raise RolloutError(f"max_batch_size is {max_batch_size}, expected at least 1")
        self._model = model
        self._max_batch_size = max_batch_size
        self._return_routing = return_routing
        self._keep_stepping = keep_stepping
        self._stops = _model_stops(model)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = self._empty_cache()
        self._settings: _Settings | None = None

    @property
    def num_active(self) -> int:
        """Rows that run."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for a place."""
        return len(self._waiting)

    def submit(
        self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> None:
        """Queue a prompt; it enters at the next step that has a place for it.

        Args:
            key: names the row in what :meth:`step` returns.
            prompt_ids: at least one token id.
            sampling: what its tokens are drawn from, and when it ends.
            seed: of its stream, 0 to ``MAX_SEED``.

        Raises:
            RolloutError: if the key is taken, the prompt is empty or holds an id outside the
                vocabulary, or the seed is out of range.
        """
        prompt = tuple(prompt_ids)
        vocab_size = self._model.model.architecture.vocab_size
        if any(row.key == key for row in (*self._rows, *self._waiting)):
            raise RolloutError(f"a row {key!r} is sampled already: give every row a key of its own")
        if not prompt:
            raise RolloutError(f"prompt {key!r} is empty, expected at least one token id")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise RolloutError(
                f"prompt {key!r} holds ids from {min(prompt)} to {max(prompt)}, expected ids of "
                f"the vocabulary, 0 to {vocab_size - 1}"
            )
        if not 0 <= seed <= MAX_SEED:
            raise RolloutError(f"the seed of prompt {key!r} is {seed}, expected 0 to {MAX_SEED}")
        stops = self._stops if sampling.stop_token_ids is None else sampling.stop_token_ids
        self._waiting.append(_Row(key, prompt, sampling, seed, frozenset(stops)))

    def cancel(self, key: Hashable) -> bool:
        """Forget a row; whether there was one."""
        for row in self._waiting:
            if row.key == key:
                self._waiting.remove(row)
                return True
        slots = [slot for slot, row in enumerate(self._rows) if row.key == key]
        self._leave(slots)
        return bool(slots)

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """Sample one token for every row that runs or enters; none if there are no rows.

        Returns:
            A token a row.

        Raises:
            RolloutError: if a row's logits are not finite.
        """
        if not self._rows:
            # what layers derived from their weights goes with the rows it was derived for
            self._cache = self._empty_cache()
        places = self._max_batch_size - len(self._rows)
        entering = [self._waiting.popleft() for _ in range(min(places, len(self._waiting)))]
        done = [self._decode()] if self._rows else []
        done += [self._prefill(group) for group in _prefill_groups(entering)]
        if not done:
            return []
        return self._draw(
            torch.cat([forward.logits_BV for forward in done]),
            [experts for forward in done for experts in forward.routing],
        )

    def _empty_cache(self) -> RowCache:
        return RowCache(self._model.model.architecture, self._model.device)

    def _decode(self) -> _Forward:
        """Run the last token of each row."""
        self._keep_stepping(True)
        hidden_BD, routing = self._model.model.decode(
            self._tensor([row.last_id for row in self._rows]), self._cache
        )
        experts: list[Tensor | None] = [None] * len(self._rows)
        if self._return_routing:
            experts = list(_stacked(routing))
        return _Forward(self._model.lm_head(hidden_BD), experts)

    def _prefill(self, group: "list[list[_Row]]") -> _Forward:
        """Run prompts, and let their rows join; ``group`` has a list of rows for each prompt."""
        self._keep_stepping(True)
        prompts = [rows[0].prompt_ids for rows in group]
        longest = max(map(len, prompts))
        ids_BT = self._tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
        mask_BT = None
        if any(len(prompt) < longest for prompt in prompts):
            first_B1 = self._tensor([[longest - len(prompt)] for prompt in prompts])
            mask_BT = torch.arange(longest, device=ids_BT.device) >= first_B1
        output = self._model.model(
            ids_BT, mask_BT, use_cache=True, output_routing=self._return_routing
        )
        rows = [row for rows in group for row in rows]
        pick = [number for number, rows in enumerate(group) for _ in rows]
        self._cache.append(output.cache, pick, [len(row.prompt_ids) for row in rows])
        self._rows += rows
        self._settings = None
        logits_BV = self._model.lm_head(output.last_hidden_state[:, -1])
        experts: list[Tensor | None] = [None] * len(rows)
        if output.routing is not None:
            stacked = _stacked(output.routing)
            experts = [
                stacked[number, longest - len(row.prompt_ids) :]
                for number, row in zip(pick, rows, strict=True)
            ]
        return _Forward(logits_BV[self._tensor(pick)], experts)

    def _draw(self, logits_BV: Tensor, routing: list[Tensor | None]) -> list[SampledToken]:
        if self._settings is None:
            self._settings = self._row_settings()
        sampling, seeds_B, filtered = self._settings
        log_probs_BV = log_distribution(logits_BV, sampling, filtered=filtered)
        counters_B = self._tensor([row.num_sampled for row in self._rows])
        ids_B = draw(log_probs_BV, uniforms(seeds_B, counters_B))
        logprobs = log_probs_BV.gather(1, ids_B[:, None])[:, 0].tolist()
        sampled, leaving = [], []
        for slot, (row, token_id, logprob, experts) in enumerate(
            zip(self._rows, ids_B.tolist(), logprobs, routing, strict=True)
        ):
            if not math.isfinite(logprob):
                raise RolloutError(
                    f"the logits of row {row.key!r} after {row.num_sampled} sampled tokens are not "
                    "finite: the adapter's training diverged, or the base's dtype overflows"
                )
            row.last_id = token_id
            row.num_sampled += 1
            reason: FinishReason | None = None
            if token_id in row.stops:
                reason = "stop"
            elif row.num_sampled == row.sampling.max_new_tokens:
                reason = "length"
            if reason is not None:
                leaving.append(slot)
            sampled.append(SampledToken(row.key, token_id, logprob, reason, experts))
        self._leave(leaving)
        return sampled

    def _leave(self, slots: list[int]) -> None:
        if not slots:
            return
        moves = self._cache.drop(slots)
        for source, target in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[moves.num_rows :]
        self._settings = None

    def _row_settings(self) -> _Settings:
        samplings = [row.sampling for row in self._rows]
        return _Settings(
            RowSampling.of(samplings, self._model.device),
            self._tensor([row.seed for row in self._rows]),
            any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings),
        )

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)


@torch.no_grad()
def run_idle(model: K3ForCausalLM, keep_stepping: KeepStepping) -> bool:
    """Take part in one forward of others, for a process whose own rows are all done.

    Where experts are spread over processes, each of them runs as many forwards as the others: it
    asks ``keep_stepping`` before each, its own and these, which run a token nobody asked for.

    Returns:
        Whether there was one: what ``keep_stepping`` answered to False.
    """
    if not keep_stepping(False):
        return False
    model.model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return True


def _model_stops(model: K3ForCausalLM) -> tuple[int, ...]:
    """Ids that end a text, as the checkpoint says."""
    eos = model.generation_config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _prefill_groups(rows: Sequence[_Row]) -> Iterator[list[list[_Row]]]:
    """Rows by prompt, prompts of near lengths together, in runs of bounded size."""
    by_prompt: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt_ids, []).append(row)
    group: list[list[_Row]] = []
    for prompt, same in sorted(by_prompt.items(), key=lambda item: len(item[0])):
        if group and (len(group) + 1) * len(prompt) > _PREFILL_TOKENS:
            yield group
            group = []
        group.append(same)
    if group:
        yield group


def _stacked(routing: dict[int, Routing]) -> Tensor:
    """Experts of all layers, int16 ``[B, T, L, A]``."""
    layers = [routing[layer].expert_ids for layer in sorted(routing)]
    return torch.stack(layers, dim=2).to(torch.int16)
