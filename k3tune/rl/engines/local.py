"""The rollout engine that samples in this process, from the trainer's own packed weights."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from k3tune import __version__
from k3tune.errors import K3TuneError, RolloutError
from k3tune.lora.frozen import FrozenFactors, Loaded
from k3tune.lora.inject import base_of
from k3tune.model.scoring import score_rows
from k3tune.rl.engines.continuous import (
    ContinuousSampler,
    KeepStepping,
    SampledToken,
    alone,
    run_idle,
)
from k3tune.rl.numerics import Activations, activation_rounding, check_activations
from k3tune.rl.rollout import EngineHealth, Rollout, Sampling
from k3tune_kernels import dispatch

_ADAPTER_DTYPES = {None: None, "bfloat16": torch.bfloat16}


class LocalEngine:
    """A :class:`~k3tune.rl.rollout.RolloutEngine` over a model of this process.

    The adapter it samples with is a copy, changed by :meth:`load_adapter` alone: what the trainer
    does to its factors in between does not reach a sample. While it samples or scores the model is
    in eval mode, without autocast and gradients; afterwards everything is as it was. Random numbers
    come from the seeds given; torch's generators are left alone.

    Args:
        model: a K3 model, or the PeftModel over one, which a trainer may hold as well.
        max_batch_size: rows sampled or scored together at most.
        activations: ``"none"``, or what an engine rounds the experts' inputs to, ``"bf16"`` or
            ``"mxfp8"`` (see :func:`k3tune.rl.numerics.activation_rounding`).
        adapter_dtype: ``"bfloat16"`` rounds the factors as real engines do; None keeps them.
        adapter_name: which adapter :meth:`load_adapter` replaces; None is the active one.
        return_routing: fill ``Rollout.routed_experts``.
        keep_stepping: for processes that share experts: called before every forward with whether
            this process has work, it answers whether any has. Processes that are done run along
            until all are.

    Attributes:
        last_push: how many tensors the last :meth:`load_adapter` was given and how many of them
            changed a value here (after rounding); None before the first. A push without a change is
            no error here: whether it is one the trainer knows.

    Raises:
        RolloutError: for another ``adapter_dtype`` or ``max_batch_size`` below 1.
        ConfigError: for other ``activations``.
    """

    last_push: Loaded | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch_size: int = 64,
        activations: Activations = "none",
        adapter_dtype: str | None = None,
        adapter_name: str | None = None,
        return_routing: bool = False,
        keep_stepping: KeepStepping = alone,
    ) -> None:
        if adapter_dtype not in _ADAPTER_DTYPES:
            raise RolloutError(f"adapter_dtype is {adapter_dtype!r}, expected None or 'bfloat16'")
        if max_batch_size < 1:
            raise RolloutError(f"max_batch_size is {max_batch_size}, expected at least 1")
        check_activations(activations)
        self._base = base_of(model)
        self._max_batch_size = max_batch_size
        self._activations = activations
        self._adapter_dtype = adapter_dtype
        self._return_routing = return_routing
        self._keep_stepping = keep_stepping
        self._version = 0
        self._closed = False
        self._factors: FrozenFactors | None = None
        if self._base is not model:
            dtype = _ADAPTER_DTYPES[adapter_dtype]
            self._factors = FrozenFactors(model, adapter_name, dtype=dtype)

    def load_adapter(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Copy an adapter's values; later samples carry ``version``.

        Args:
            version: above the live one.
            source: an adapter directory of the same modules, ranks and alphas, or the tensors of
                :func:`k3tune.lora.adapter_state`.

        Raises:
            RolloutError: if the version is not above the live one, the model has no adapter, or the
                source does not fit it; the live adapter then stays.
        """
        self._check_open()
        if self._factors is None:
            raise RolloutError(
                "the engine's model has no adapter to replace: attach one (attach_lora) before the "
                "engine is made"
            )
        if version <= self._version:
            raise RolloutError(
                f"adapter version {version} was pushed and {self._version} is live, expected a "
                "version above it"
            )
        try:
            self.last_push = self._factors.load(source)
        except K3TuneError as error:
            raise RolloutError(f"adapter version {version} does not load: {error}") from error
        self._version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Sample one completion a prompt, in the order given.

        Args:
            prompts: token ids; a repeated prompt is prefilled once where its rows start together.
            sampling: the distribution, and when to stop.
            seeds: one a prompt.

        Raises:
            RolloutError: for prompts that cannot be sampled (counted from 0), another number of
                seeds, or logits that are not finite.
        """
        if len(prompts) != len(seeds):
            raise RolloutError(
                f"{len(prompts)} prompts came with {len(seeds)} seeds, expected one seed a prompt"
            )
        self._check_open()
        sampler = ContinuousSampler(
            self._base,
            max_batch_size=self._max_batch_size,
            return_routing=self._return_routing,
            keep_stepping=self._keep_stepping,
        )
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampler.submit(number, prompt, sampling, seed)
        sampled: dict[Hashable, list[SampledToken]] = {n: [] for n in range(len(prompts))}
        with self._sampling():
            while sampler.num_active or sampler.num_waiting:
                for token in sampler.step():
                    sampled[token.key].append(token)
            while run_idle(self._base, self._keep_stepping):
                pass
        return [self._rollout(prompt, sampled[number]) for number, prompt in enumerate(prompts)]

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given completions under the live adapter, at temperature 1.

        Args:
            sequences: pairs of prompt ids and completion ids, neither empty.

        Returns:
            One list a pair, as long as its completion.

        Raises:
            RolloutError: for a pair that cannot be scored, or a log-probability that is not finite.
        """
        self._check_open()
        self._check_sequences(sequences)
        # long ones first, so that little is padded
        order = sorted(range(len(sequences)), key=lambda n: -sum(map(len, sequences[n])))
        scores: list[list[float]] = [[] for _ in sequences]
        with self._sampling():
            for start in range(0, len(order), self._max_batch_size):
                batch = order[start : start + self._max_batch_size]
                self._keep_stepping(True)
                found = self._score_batch([sequences[number] for number in batch])
                for number, row in zip(batch, found, strict=True):
                    scores[number] = row
            while run_idle(self._base, self._keep_stepping):
                pass
        return scores

    def health(self) -> EngineHealth:
        """The live version, and everything a floor measured with this engine depends on.

        Raises:
            RolloutError: if the engine is closed.
        """
        self._check_open()
        parameter = self._base.lm_head.weight
        kernels = dispatch.choose("moe_lora", self._base.model.kernels, parameter)
        return EngineHealth(
            self._version,
            {
                "engine": "local",
                "version": __version__,
                "torch": torch.__version__,
                "device": parameter.device.type,
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "kernels": kernels,
                "activations": self._activations,
                "adapter_dtype": self._adapter_dtype or "float32",
            },
        )

    def close(self) -> None:
        """Release the copy of the adapter; a second call does nothing."""
        self._factors = None
        self._closed = True

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The model as it samples; as it was afterwards."""
        training = [module for module in self._base.modules() if module.training]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self._base.device.type, enabled=False))
            stack.enter_context(activation_rounding(self._base, self._activations))
            if self._factors is not None:
                stack.enter_context(self._factors.applied())
            try:
                self._base.eval()
                yield
            finally:
                for module in training:
                    module.training = True

    def _score_batch(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[list[float]]:
        rows = [[*prompt, *completion] for prompt, completion in sequences]
        try:
            found = score_rows(self._base, rows, batch_size=len(rows))
        except K3TuneError as error:
            raise RolloutError(str(error)) from error
        return [
            [value for value in row[len(prompt) :] if value is not None]
            for row, (prompt, _) in zip(found, sequences, strict=True)
        ]

    def _check_sequences(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        vocab_size = self._base.model.architecture.vocab_size
        for number, (prompt, completion) in enumerate(sequences):
            if not prompt or not completion:
                raise RolloutError(
                    f"sequence {number} has {len(prompt)} prompt and {len(completion)} completion "
                    "ids, expected at least one of each"
                )
            ids = (*prompt, *completion)
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise RolloutError(
                    f"sequence {number} holds ids from {min(ids)} to {max(ids)}, expected ids of "
                    f"the vocabulary, 0 to {vocab_size - 1}"
                )

    def _rollout(self, prompt: Sequence[int], tokens: list[SampledToken]) -> Rollout:
        reason = tokens[-1].finish_reason
        assert reason is not None, "a row is sampled to its end"
        routed = [token.routed_experts for token in tokens if token.routed_experts is not None]
        return Rollout(
            tuple(prompt),
            tuple(token.token_id for token in tokens),
            tuple(token.logprob for token in tokens),
            reason,
            self._version,
            torch.cat(routed).cpu() if self._return_routing else None,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the engine is closed: make another one")
