"""Proof that an adapter trains: every factor that could have moved did, within two steps.

Shape letters: ``N`` tokens, ``A`` active experts a token, ``E`` experts of the model, ``M`` rows
of a factor: the local experts, or 1 where all share it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from k3tune.errors import AdapterError
from k3tune.lora.inject import active_adapter, adapter_layers, base_of
from k3tune.lora.layers import LoraPackedProjection
from k3tune.model.latent_moe import RoutedExperts

logger = logging.getLogger(__name__)

_STEPS = 2
_SHOWN = 8
# Odd, so that no bit of a weight is lost in the sum; from splitmix64.
_MIX = -7046029254386353131


@dataclass(frozen=True)
class WatchReport:
    """What the check saw.

    Attributes:
        factors: factors that had to train, and did; an expert's row of a stacked one counts.
        untouched_experts: rows of B whose expert saw no token the loss depends on.
    """

    factors: int
    untouched_experts: int


class _Factor(NamedTuple):
    """One factor: its rows that had a gradient, and a checksum a row at the start (of B)."""

    name: str
    half: str
    weight: nn.Parameter
    experts: str | None
    had_gradient_M: Tensor
    before_M: Tensor
    adapted_M: Tensor


class _Tokens:
    """Which experts of one layer took part in the loss, step by step."""

    def __init__(self, num_experts: int, local_experts: Tensor | None, device: torch.device):
        self.local = None if local_experts is None else local_experts.to(device)
        # the last place takes the tokens that do not count
        self.seen = torch.zeros(num_experts + 1, dtype=torch.bool, device=device)
        self.steps: list[Tensor] = []

    def add(self, expert_ids_NA: Tensor, grad_ND: Tensor) -> None:
        """Count the experts of tokens that have a gradient: others cannot train anything."""
        counts_N1 = grad_ND.ne(0).any(-1, keepdim=True)
        places = expert_ids_NA.masked_fill(~counts_N1, len(self.seen) - 1)
        self.seen.scatter_(0, places.flatten().long(), torch.ones_like(places.flatten()).bool())

    def end_step(self, *, counts: bool) -> None:
        """Keep what was seen since the last step, where that one ``counts``, and begin anew."""
        if counts:
            seen = self.seen[:-1]
            self.steps.append(seen.clone() if self.local is None else seen[self.local])
        self.seen.zero_()


class FactorWatch:
    """Fails a run whose adapter does not train.

    From its construction on hooks note which factors had a gradient and which experts saw tokens
    the loss depends on. At the second optimizer step with a learning rate above 0:

    - every B whose module (or expert) saw such a token must have had a non-zero gradient, and have
      changed;
    - every A must have had a non-zero gradient, if B was no longer zero when its tokens came: at
      the first step dA = 0, because B = 0.

    Factors of experts without tokens are counted, not failed. Works under gradient accumulation,
    activation checkpointing and trainers that move gradients away from ``.grad``.
    """

    def __init__(self, model: PeftModel, adapter_name: str | None = None) -> None:
        """Watch an adapter.

        Args:
            model: with a trainable adapter.
            adapter_name: None is the active one.

        Raises:
            AdapterError: if no factor of it is trainable.
        """
        adapter_name = active_adapter(model, adapter_name)
        base = base_of(model)
        self._factors: list[_Factor] = []
        self._tokens: dict[str, _Tokens] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._report: WatchReport | None = None
        self._steps_done = 0
        for name, layer in adapter_layers(model, adapter_name).items():
            ranks = None
            if isinstance(layer, LoraPackedProjection):
                ranks = layer.expert_ranks.get(adapter_name)
                self._watch_tokens(base, name.rpartition(".")[0])
            for half in "AB":
                weight = layer.factor(adapter_name, half)
                if weight.requires_grad:
                    self._watch_factor(name, half, weight, isinstance(layer, LoraPackedProjection))
                    self._leave_out(ranks)
        if not self._factors:
            raise AdapterError(
                f"no factor of adapter {adapter_name!r} is trainable: use attach_lora, or "
                "load_adapter(..., trainable=True)"
            )

    @property
    def report(self) -> WatchReport | None:
        """The result; None before the second step with a learning rate above 0."""
        return self._report

    def after_step(self, learning_rate: float) -> WatchReport | None:
        """Call after each optimizer step with the rate it used; nothing to do once checked.

        Returns:
            The report, when the check is done; None before.

        Raises:
            AdapterError: naming the factors that did not train.
        """
        if self._report is not None:
            return self._report
        for tokens in self._tokens.values():
            tokens.end_step(counts=learning_rate > 0)
        self._steps_done += learning_rate > 0
        if self._steps_done < _STEPS:
            return None
        self.close()
        self._report = self._check()
        return self._report

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch_tokens(self, base: nn.Module, name: str) -> None:
        experts = base.get_submodule(name)
        if name in self._tokens or not isinstance(experts, RoutedExperts):
            return
        total = base_of(base).model.architecture.num_experts
        device = experts.w1.weight.packed.device
        tokens = self._tokens[name] = _Tokens(total, experts.local_experts, device)

        def on_forward(_: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            # the same layer may run again (accumulation, recompute): each output has its own ids
            if output.requires_grad:
                ids = inputs[1]
                output.register_hook(lambda grad: tokens.add(ids, grad))

        self._handles.append(experts.register_forward_hook(on_forward))

    def _watch_factor(self, name: str, half: str, weight: nn.Parameter, packed: bool) -> None:
        rows = len(weight) if packed else 1
        nothing = torch.zeros(rows, dtype=torch.bool, device=weight.device)
        before = checksum(weight, rows) if half == "B" else nothing
        factor = _Factor(
            f"{name}.lora_{half}",
            half,
            weight,
            name.rpartition(".")[0] if packed else None,
            nothing,
            before,
            torch.ones_like(nothing),
        )

        def on_gradient(grad: Tensor) -> None:
            factor.had_gradient_M.logical_or_(grad.detach().ne(0).view(rows, -1).any(1))

        self._handles.append(weight.register_hook(on_gradient))
        self._factors.append(factor)

    def _leave_out(self, ranks: Sequence[int] | None) -> None:
        """Experts of rank 0 have no factors."""
        adapted = self._factors[-1].adapted_M
        if ranks is not None and len(adapted) == len(ranks):
            adapted.copy_(torch.tensor(ranks, device=adapted.device) > 0)

    def _check(self) -> WatchReport:
        by_name = {factor.name: factor for factor in self._factors}
        failed: list[str] = []
        count = untouched = 0
        for factor in self._factors:
            other = by_name.get(factor.name[:-1] + ("B" if factor.half == "A" else "A"))
            due = self._due(factor, other) & factor.adapted_M
            had = factor.had_gradient_M
            failed += self._names(factor, due & ~had, "no gradient")
            if factor.half == "B":
                changed = checksum(factor.weight, len(had)) != factor.before_M
                failed += self._names(factor, due & had & ~changed, "unchanged")
                untouched += int((~due & factor.adapted_M).sum())
            count += int(due.sum())
        if failed:
            more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
            raise AdapterError(
                f"after {_STEPS} optimizer steps {len(failed)} factors that saw tokens did not "
                f"train: {', '.join(failed[:_SHOWN])}{more}: expected a gradient in each, and "
                "every lora_B changed; is each of them in the optimizer, and is nothing detached?"
            )
        logger.info("%d factors train; %d experts' factors saw no token yet", count, untouched)
        return WatchReport(count, untouched)

    def _due(self, factor: _Factor, other: _Factor | None) -> Tensor:
        """Rows that must have trained, by what their experts saw."""
        if factor.experts is None:
            return torch.ones_like(factor.had_gradient_M)
        first, second = self._tokens[factor.experts].steps
        if factor.half == "B":
            seen = first | second
        elif other is None:
            # B does not train here: whether it is zero is not known
            return torch.zeros_like(factor.had_gradient_M)
        else:
            # B moved at the first step: its own expert's row, or the one all share
            moved = first if len(other.had_gradient_M) == len(first) else first.any()
            seen = moved & second
        return seen if len(factor.had_gradient_M) == len(seen) else seen.any()[None]

    def _names(self, factor: _Factor, rows_M: Tensor, what: str) -> list[str]:
        rows = rows_M.nonzero().flatten().tolist()
        if factor.experts is None or len(rows_M) != len(self._tokens[factor.experts].steps[0]):
            return [f"{factor.name} ({what})" for _ in rows]
        local = self._tokens[factor.experts].local
        experts = rows if local is None else local[rows_M].tolist()
        return [f"{factor.name} of expert {expert} ({what})" for expert in experts]


def checksum(weight: Tensor, rows: int) -> Tensor:
    """An int64 a row that any changed value changes, but for one chance in 2^64.

    Args:
        weight: fp32, of any shape that splits into rows.
        rows: leading parts that get a number each.
    """
    bits = weight.detach().contiguous().view(rows, -1).view(torch.int32)
    odd = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device) * _MIX
    return torch.stack([(row.long() * odd).sum() for row in bits])
