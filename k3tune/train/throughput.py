"""What a device could do, and the work that a trained token takes on a frozen base."""

from typing import Any

import torch

from k3tune.lora import adapter_parameters
from k3tune.lora.inject import base_of
from k3tune.lora.targets import adaptable_modules
from k3tune.model.latent_moe import LatentMoE, PackedProjection
from k3tune.plan.hardware import dense_peak


def device_peak(device: torch.device) -> float | None:
    """Dense BF16 peak of a device in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    return dense_peak(torch.cuda.get_device_name(device))


def flops_per_token(model: Any) -> float:
    """Multiply-adds (two FLOPs each) of matrices that one token of a training step needs.

    A frozen matrix is used twice, forward and for the gradient of its input; a factor three times.
    Of the experts, those a token is routed to count. Attention scores, KDA's state and the
    recomputation of checkpointed layers do not count, so an MFU made of this is a lower bound of
    the device's use.

    Args:
        model: with an adapter.
    """
    base = base_of(model)
    active = base.model.architecture.num_experts_per_token
    frozen = base.lm_head.weight.numel()
    for module in adaptable_modules(base).values():
        uses = active if isinstance(module, PackedProjection) else 1
        frozen += uses * module.in_features * module.out_features
    frozen += sum(
        module.gate.weight.numel() for module in base.modules() if isinstance(module, LatentMoE)
    )
    trained = 0
    for group in adapter_parameters(model).values():
        for parameter in group.values():
            rows = parameter.shape[0] if parameter.ndim == 3 else 1
            trained += parameter.numel() // rows * (active if parameter.ndim == 3 else 1)
    return 2.0 * (2 * frozen + 3 * trained)
