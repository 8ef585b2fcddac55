"""A fingerprint of the frozen base: equal before and after training, on any number of processes."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from k3tune.errors import AdapterError
from k3tune.lora.inject import base_of, local_experts
from k3tune.model.latent_moe import PackedProjection

_CHUNK_BYTES = 64 << 20
_WRAPPED = ".base_layer."


def base_fingerprint(model: nn.Module) -> str:
    """SHA-256 over all parameters of the base, with or without adapters around it.

    Reads every byte once, a chunk at a time. The dtype is in the hash: one checkpoint loaded in
    bf16 and in fp32 has two fingerprints.

    Args:
        model: a K3 model, or the PeftModel over one.

    Returns:
        ``"sha256:"`` and 64 hex digits.

    Raises:
        AdapterError: if weights of the base are spread over processes layer by layer.
    """
    base = base_of(model)
    # weights that are no parameters: those below would be a part of the base only
    if any(isinstance(vars(m).get(name), Tensor) for m in base.modules() for name in m._parameters):
        raise AdapterError(
            "the base's trunk is sharded over processes, expected a whole one: merge base_digests "
            "with k3tune.parallel's trunk_digests, or pass the fingerprint of an earlier save"
        )
    return combine_digests(base_digests(model))


def base_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each base parameter held here, of each expert where experts are stacked.

    Processes that hold different parts can merge theirs and :func:`combine_digests`.

    Returns:
        ``"<parameter> <dtype> <shape>"``, with the expert's global id in the parameter's name,
        -> hex digest.
    """
    base = base_of(model)
    digests = {}
    for name, parameter in _base_parameters(base):
        tensor = parameter.detach()
        owner, _, leaf = name.rpartition(".")
        if leaf in ("packed", "scale") and _is_packed(base, owner):
            ids = local_experts(base, owner) or range(len(tensor))
            for expert, row in zip(ids, tensor, strict=True):
                digests[label_of(f"{owner}.{expert}.{leaf}", row)] = digest_of(row)
        else:
            digests[label_of(name, tensor)] = digest_of(tensor)
    return digests


def combine_digests(digests: Mapping[str, str]) -> str:
    """One fingerprint of digests by label, whatever their order."""
    total = hashlib.sha256()
    for label in sorted(digests):
        total.update(f"{label} {digests[label]}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _base_parameters(base: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names they have without adapters; factors are left out."""
    for name, parameter in base.named_parameters():
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(_WRAPPED, "."), parameter


def _is_packed(base: nn.Module, name: str) -> bool:
    module = base.get_submodule(name)
    wrapped = dict(module.named_children()).get("base_layer", module)
    return isinstance(wrapped, PackedProjection)


def label_of(name: str, tensor: Tensor) -> str:
    """``"<parameter> <dtype> <shape>"`` of a parameter, or of one expert's row of it."""
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, 64 hex digits."""
    hasher = hashlib.sha256()
    content = tensor.contiguous().flatten().view(torch.uint8)
    for start in range(0, len(content), _CHUNK_BYTES):
        hasher.update(content[start : start + _CHUNK_BYTES].cpu().numpy().data)
    return hasher.hexdigest()
