"""Random weights for a model that is not loaded: tests, the small embedded base, measurements."""

import torch
from torch import nn

from k3tune.model.kda import KimiDeltaAttention
from k3tune.model.latent_moe import PackedProjection, Router
from k3tune.model.layers import ShortConvolution
from k3tune_kernels.mxfp4 import encode


@torch.no_grad()
def initialize(module: nn.Module, std: float) -> None:
    """Fill the parameters ``module`` itself owns.

    Matrices are normal with ``std``; norms, residual queries, ``A_log`` and the router's bias
    keep the constants they are built with (tech report: ``A_log`` 0). A convolution starts as a
    slightly perturbed identity, ``dt_bias`` uniform in (-6, -1), so that heads forget at
    different rates. Experts are encoded to MXFP4.

    Args:
        module: any module of the model; one on the meta device is left alone.
        std: standard deviation of matrices.
    """
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return
    if isinstance(module, nn.Linear | nn.Embedding | Router):
        module.weight.normal_(std=std)
    elif isinstance(module, ShortConvolution):
        module.weight.normal_(std=0.3)
        module.weight[..., -1] += 0.5
    elif isinstance(module, KimiDeltaAttention):
        module.dt_bias.uniform_(-6.0, -1.0)
    elif isinstance(module, PackedProjection):
        shape = (module.num_experts, module.out_features, module.in_features)
        packed, scale = encode(torch.randn(shape) * std, scale_rule="ceil")
        module.packed.copy_(packed)
        module.scale.copy_(scale)
