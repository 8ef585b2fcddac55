"""Experts of the trainer's forward: what its routers chose, and the replay of the rollout's.

Shape letters: ``B`` samples, ``T`` = ``P`` + ``C`` tokens (prompts padded on the left, completions
on the right), ``L`` MoE layers, ``A`` active experts a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from k3tune.errors import RolloutError
from k3tune.lora.inject import base_of
from k3tune.model.backbone import K3ModelOutput
from k3tune.model.documents import FrontPadding
from k3tune.model.latent_moe import Router
from k3tune.monitor.routing import smallest_overlap
from k3tune.rl.rollout import Rollout


class RoutingTap:
    """While it is entered: notes the experts a forward uses, and those its routers would choose.

    These differ where experts are given. Layers that are run again for their gradient, after the
    block, are not noted again.
    """

    def __init__(self, model: nn.Module, mask_BT: Tensor) -> None:
        """Of one forward.

        Args:
            model: K3 or the PeftModel over it, no wrapper around.
            mask_BT: the forward's attention mask.
        """
        self._backbone = base_of(model).model
        self._mask_BT = mask_BT
        self._handles: list[Any] = []
        self._chosen: list[Tensor] = []
        self._used: dict[int, Tensor] = {}
        self.layers = tuple(self._backbone.architecture.moe_layers)
        self.num_active = self._backbone.architecture.num_experts_per_token

    @property
    def used(self) -> Tensor:
        """``[B, T, L, A]`` int16, experts of the forward; padding holds anything."""
        return torch.stack([self._used[layer] for layer in self.layers], dim=2)

    @property
    def chosen(self) -> Tensor:
        """``[B, T, L, A]`` int16, what the routers chose, or would have."""
        if not self._chosen:
            return self.used
        front = FrontPadding(self._mask_BT)
        # the layers see padding moved to the front of each row
        return torch.stack([front.restore(ids) for ids in self._chosen], dim=2)

    def __enter__(self) -> "RoutingTap":
        self._handles = [
            self._backbone.register_forward_pre_hook(_ask_for_routing, with_kwargs=True),
            self._backbone.register_forward_hook(self._note_used),
            *(
                module.register_forward_hook(self._note_chosen)
                for module in self._backbone.modules()
                if isinstance(module, Router)
            ),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _note_used(self, _: nn.Module, __: Any, output: K3ModelOutput) -> None:
        assert output.routing is not None, "it was asked for"
        self._used = {
            layer: routing.expert_ids.to(torch.int16) for layer, routing in output.routing.items()
        }

    def _note_chosen(self, router: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        given = len(args) > 1 and args[1] is not None
        if given:
            with torch.no_grad():
                self._chosen.append(router.forward(args[0]).expert_ids.to(torch.int16))


def _ask_for_routing(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "output_routing": True}


def replayed_experts(
    tap: RoutingTap, rollouts: Sequence[Rollout], prompt_mask_BP: Tensor, num_completion: int
) -> dict[int, Tensor]:
    """The rollouts' experts for a forward, ``[B, T, A]`` by zero-based layer.

    Args:
        tap: of the model.
        rollouts: the batch's, in its order.
        prompt_mask_BP: 1 at prompt tokens, which stand at the end of each row.
        num_completion: ``C``.

    Raises:
        RolloutError: if a sample came without its experts, or with those of other layers.
    """
    batch, num_prompt = prompt_mask_BP.shape
    shape = (batch, num_prompt + num_completion, len(tap.layers), tap.num_active)
    # padding, and a row's last token, which predicts nothing: any different experts will do
    experts_BTLA = torch.arange(tap.num_active).expand(shape).clone()
    for row, rollout in enumerate(rollouts):
        routed_TLA = routed_of(rollout, tap)
        start = num_prompt - len(rollout.prompt_ids)
        experts_BTLA[row, start : start + len(routed_TLA)] = routed_TLA.long()
    experts_BTLA = experts_BTLA.to(prompt_mask_BP.device)
    return {layer: experts_BTLA[:, :, place] for place, layer in enumerate(tap.layers)}


def routed_of(rollout: Rollout, tap: RoutingTap) -> Tensor:
    """A sample's experts, ``[tokens - 1, L, A]``.

    Raises:
        RolloutError: if there are none, or of another shape than the model's.
    """
    tokens = len(rollout.prompt_ids) + len(rollout.completion_ids)
    expected = (tokens - 1, len(tap.layers), tap.num_active)
    found = None if rollout.routed_experts is None else tuple(rollout.routed_experts.shape)
    if rollout.routed_experts is None or found != expected:
        raise RolloutError(
            f"a sample came with experts of shape {found}, expected {expected} (tokens but the "
            "last, MoE layers, experts a token): turn them on in the engine, or set routing to "
            "ignore"
        )
    return rollout.routed_experts


def rollout_experts(tap: RoutingTap, rollouts: Sequence[Rollout], num_completion: int) -> Tensor:
    """The rollouts' experts where each completion token was predicted, ``[B, C, L, A]`` int16.

    Args:
        tap: of the model.
        rollouts: the batch's, in its order.
        num_completion: ``C``; places after a completion's end hold -1.
    """
    shape = (len(rollouts), num_completion, len(tap.layers), tap.num_active)
    experts_BCLA = torch.full(shape, -1, dtype=torch.int16)
    for row, rollout in enumerate(rollouts):
        routed_CLA = routed_of(rollout, tap)[len(rollout.prompt_ids) - 1 :]
        experts_BCLA[row, : len(routed_CLA)] = routed_CLA
    return experts_BCLA


def trainer_experts(tap: RoutingTap, num_prompt: int) -> Tensor:
    """The trainer's own choice where each completion token was predicted, ``[B, C, L, A]``."""
    return tap.chosen[:, num_prompt - 1 : -1].cpu()


def prompt_overlaps(tap: RoutingTap, rollouts: Sequence[Rollout], num_prompt: int) -> list[float]:
    """``[B]``: smallest share of experts both sides chose for a prompt token, its last left out.

    Args:
        tap: of the model.
        rollouts: the batch's, in its order.
        num_prompt: ``P``.
    """
    chosen_BPLA = tap.chosen[:, : num_prompt - 1].cpu()
    overlaps = []
    for row, rollout in enumerate(rollouts):
        count = len(rollout.prompt_ids) - 1
        theirs_PLA = routed_of(rollout, tap)[:count].to(torch.int16)
        ours_PLA = chosen_BPLA[row, num_prompt - 1 - count :]
        overlaps.append(smallest_overlap(ours_PLA.numpy(), theirs_PLA.cpu().numpy()))
    return overlaps
