"""Write an adapter as a standard PEFT directory, whole or not at all."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor

import k3tune
from k3tune.errors import AdapterError
from k3tune.lora.config_file import config_document
from k3tune.lora.directory import new_adapter_directory
from k3tune.lora.fingerprint import base_fingerprint as fingerprint_of
from k3tune.lora.inject import active_adapter, adapter_layers, base_of, local_experts
from k3tune.lora.keys import CONFIG_NAME, METADATA_FORMAT, METADATA_NAME
from k3tune.lora.layers import AdapterLayer, LoraPackedProjection
from k3tune.lora.shards import DTYPE_NAMES, Pending, write_json, write_shards
from k3tune.lora.shards import Entry as FileEntry
from k3tune.lora.spec import FORMS
from k3tune.lora.state import Entry, layer_entries, ranks_and_alphas, written_slots
from k3tune.lora.targets import RankAlpha, adaptable_modules, config_fields, whole_numbers
from k3tune.model.modeling import K3ForCausalLM

logger = logging.getLogger(__name__)


class Gather(Protocol):
    """How factors come together whose rows, one an expert, lie on several processes.

    Factors are named ``"<module>.lora_A"`` and ``"<module>.lora_B"``.
    """

    @property
    def writes(self) -> bool:
        """Whether this process gets whole factors, and writes the files."""

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole factor from that of this process's rows."""

    def whole(self, name: str, value: Tensor) -> Tensor | None:
        """The whole factor, or None where this process does not write; all call it in one order."""


def save_adapter(
    model: PeftModel,
    path: str | Path,
    *,
    version: int = 0,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    adapter_name: str | None = None,
    shard_bytes: int = 4 << 30,
    overwrite: bool = False,
    base_fingerprint: str | None = None,
    gather: Gather | None = None,
) -> Path:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and ``k3tune.json``.

    The directory appears under its name once everything is on disk. Expert factors are written
    stacked, ``experts.w1.lora_A.weight`` ``[E or 1, r, in]`` and ``lora_B`` ``[E or 1, out, r]``
    (experts that differ in rank or alpha one by one); :func:`load_adapter` reads them back, plain
    ``PeftModel.from_pretrained`` does not.

    Args:
        model: with an adapter.
        path: directory to make.
        version: number of this state of the adapter, for whoever pushes it to a server.
        provenance: where it comes from, anything JSON can hold.
        dtype: of the factors. bfloat16 is what servers take and half the size, but rounds the
            FP32 masters; float32 keeps them exactly.
        adapter_name: None is the active one.
        shard_bytes: a larger adapter is split into several files with an index.
        overwrite: replace an adapter directory that is there.
        base_fingerprint: of the base, where known; None reads the whole base to find it.
        gather: of an expert-parallel run; every process must then call this function.

    Returns:
        The directory.

    Raises:
        AdapterError: if the base holds only some experts, a factor is not finite, the directory
            exists or cannot be written, or an argument is not usable.
    """
    adapter_name = active_adapter(model, adapter_name)
    path = Path(path)
    _check_arguments(version, provenance, dtype, shard_bytes)
    base, layers = base_of(model), adapter_layers(model, adapter_name)
    if gather is None:
        _check_complete(base, layers)
    tensors = _tensors(layers, adapter_name, dtype, gather)
    if gather is not None and not gather.writes:
        for tensor in tensors:
            for _ in tensor.parts():
                pass
        return path
    with new_adapter_directory(path, overwrite=overwrite) as folder:
        write_json(folder / CONFIG_NAME, _config(model, base, layers, adapter_name))
        base_metadata = _base_metadata(base, base_fingerprint)
        form = experts_form(layers, adapter_name)
        write_json(folder / METADATA_NAME, _metadata(version, form, base_metadata, provenance))
        write_shards(folder, tensors, shard_bytes)
    logger.info("%s: wrote %d tensors of %d modules", path, len(tensors), len(layers))
    return path


def experts_form(layers: Mapping[str, AdapterLayer], adapter_name: str) -> str | None:
    """The form of the experts' factors; ``"mixed"`` if layers differ, None without any."""
    forms = {
        layer.form(adapter_name)
        for layer in layers.values()
        if isinstance(layer, LoraPackedProjection)
    }
    if len(forms) > 1:
        return "mixed"
    return next((form for form in FORMS if form in forms), None)


def _metadata(
    version: int,
    form: str | None,
    base: Mapping[str, str | None],
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "format": METADATA_FORMAT,
        "k3tune": k3tune.__version__,
        "form": form,
        "version": version,
        "base": base,
        "provenance": dict(provenance or {}),
    }


def _base_metadata(base: K3ForCausalLM, fingerprint: str | None) -> dict[str, str | None]:
    return {
        "name": base.config.name_or_path,
        "dtype": str(base.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "fingerprint": fingerprint or fingerprint_of(base),
    }


def _tensors(
    layers: Mapping[str, AdapterLayer],
    adapter_name: str,
    dtype: torch.dtype,
    gather: Gather | None,
) -> list[Pending]:
    return [
        _pending(entry, f"{name}.lora_{entry.slot.half}", dtype, gather)
        for name, layer in layers.items()
        for entry in layer_entries(
            layer, adapter_name, written_slots(layer, name, adapter_name, None)
        )
    ]


def _pending(entry: Entry, name: str, dtype: torch.dtype, gather: Gather | None) -> Pending:
    def parts() -> Iterator[Tensor]:
        value: Tensor | None = entry.value.to(dtype)
        if gather is not None and value is not None:
            value = gather.whole(name, value)
        if value is None:
            return
        tensor = value.cpu()
        if not torch.isfinite(tensor).all():
            raise AdapterError(
                f"{entry.slot.key}: expected finite values, found "
                f"{int((~torch.isfinite(tensor)).sum())} that are not, as {dtype}: the training "
                "diverged (go back to an earlier checkpoint), or dtype is too narrow"
            )
        yield tensor

    shape = tuple(entry.value.shape)
    if gather is not None:
        shape = gather.whole_shape(name, shape)
    return Pending([FileEntry(entry.slot.key, dtype, shape)], parts)


def _config(
    model: PeftModel,
    base: K3ForCausalLM,
    layers: Mapping[str, AdapterLayer],
    adapter_name: str,
) -> dict[str, Any]:
    """The standard fields of a PEFT config, ranks and alphas as the factors have them."""
    names = dict.fromkeys(adaptable_modules(base))
    chosen: dict[str, RankAlpha] = {}
    for name, layer in layers.items():
        found = ranks_and_alphas(layer, name, adapter_name, None)
        chosen |= found
        if name not in found:
            # written expert by expert: the experts' own names stand for the module's
            stack, _, projection = name.rpartition(".")
            total = base.model.architecture.num_experts
            names |= dict.fromkeys(f"{stack}.{expert}.{projection}" for expert in range(total))
            del names[name]
    fields = config_fields(chosen, names)
    for field in ("lora_alpha", "alpha_pattern"):
        fields[field] = whole_numbers(fields[field])
    live = model.peft_config[adapter_name]
    assert isinstance(live, LoraConfig), f"{type(live)=}"
    return config_document(
        fields,
        base_name=base.config.name_or_path,
        use_rslora=live.use_rslora,
        dropout=live.lora_dropout,
        init=live.init_lora_weights,
    )


def _check_arguments(
    version: int, provenance: Mapping[str, Any] | None, dtype: torch.dtype, shard_bytes: int
) -> None:
    if type(version) is not int or version < 0:
        raise AdapterError(f"version is {version!r}, expected an integer of at least 0")
    if dtype not in DTYPE_NAMES:
        raise AdapterError(f"dtype is {dtype}, expected one of {', '.join(map(str, DTYPE_NAMES))}")
    if not shard_bytes > 0 or math.isnan(shard_bytes):
        raise AdapterError(f"shard_bytes is {shard_bytes!r}, expected a number above 0")
    try:
        json.dumps(dict(provenance or {}))
    except (TypeError, ValueError) as error:
        raise AdapterError(
            f"provenance is {provenance!r}, expected a mapping that JSON can hold ({error})"
        ) from error


def _check_complete(base: K3ForCausalLM, layers: Mapping[str, AdapterLayer]) -> None:
    for name, layer in layers.items():
        experts = local_experts(base, name)
        if isinstance(layer, LoraPackedProjection) and experts is not None:
            raise AdapterError(
                f"{name}: this process holds {len(experts)} of "
                f"{base.model.architecture.num_experts} experts, expected all of them in order: an "
                "adapter is written whole; load the base with experts=None, or gather the factors"
            )
