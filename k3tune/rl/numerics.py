"""Activations rounded as rollout engines round them, in the engine's model or in the trainer's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch import nn

from k3tune.errors import ConfigError
from k3tune.model.latent_moe import RoutedExperts

Activations = Literal["none", "bf16", "mxfp8"]
"""What enters the routed experts' projections: as it is, or rounded to BF16 or MXFP8."""


def check_activations(activations: str) -> None:
    """Refuse a name that is not one of :data:`Activations`.

    Raises:
        ConfigError: for another one.
    """
    if activations not in get_args(Activations):
        raise ConfigError(
            f"activations is {activations!r}, expected one of {', '.join(get_args(Activations))}"
        )


@contextmanager
def activation_rounding(model: nn.Module, activations: Activations) -> Iterator[None]:
    """A context in which the inputs of w1, w3 and w2 of all routed experts are rounded.

    Each projection's LoRA reads the rounded input as well. Gradients pass as if nothing were
    rounded. It sets what is used in the block, also where another one is open around it: an engine
    and a trainer that share a model each have their own.

    Args:
        model: a K3 model, or a wrapper around one.
        activations: ``"bf16"`` changes nothing in a BF16 model.

    Raises:
        ConfigError: for another name, or a model without routed experts.
    """
    check_activations(activations)
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if not experts and activations != "none":
        raise ConfigError(
            f"activations is {activations!r}, but {type(model).__name__} has no routed experts "
            "whose inputs could be rounded: use 'none'"
        )
    before = [module.activation_rounding for module in experts]
    try:
        for module in experts:
            module.activation_rounding = activations
        yield
    finally:
        for module, value in zip(experts, before, strict=True):
            module.activation_rounding = value
