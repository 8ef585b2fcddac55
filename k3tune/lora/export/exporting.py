"""Write an adapter in the layout a consumer reads, streaming, without touching the base."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import k3tune
from k3tune.errors import AdapterError
from k3tune.lora.config_file import config_document
from k3tune.lora.directory import new_adapter_directory
from k3tune.lora.export import serving
from k3tune.lora.export.base_record import base_record
from k3tune.lora.export.capabilities import ENGINES, FORMATS
from k3tune.lora.export.factors import (
    AdapterSource,
    adapter_folder,
    base_folder,
    checked_version,
    read_source,
)
from k3tune.lora.export.layout import plan_layout
from k3tune.lora.export.stream import (
    DIGESTS_NAME,
    RUN_BYTES,
    DigestLog,
    dtype_named,
    pending_tensors,
)
from k3tune.lora.export.written import Layout, WrittenModule
from k3tune.lora.keys import CONFIG_NAME, METADATA_FORMAT, METADATA_NAME
from k3tune.lora.read import FactorReader, read_adapter
from k3tune.lora.shards import DTYPE_NAMES, write_json, write_shards
from k3tune.published.safetensors_files import read_json

CARD_NAME = "README.md"


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        path: the directory.
        engine: name and version of the consumer it is for.
        form: of the experts' factors; None without experts.
        tensors, size_bytes: of all files together.
        rank: the largest.
        changes: what is not written as it was trained.
        dropped: modules left out, by what ``drop`` named.
        zeros: modules and experts written as zeros because the engine needs them, with the reason.
        verdict: whether the engine serves it as released.
        patches: what must be patched first.
        command: the command line that serves it; None for PEFT.
    """

    path: Path
    engine: str
    form: str | None
    tensors: int
    size_bytes: int
    rank: int
    changes: Sequence[str]
    dropped: Mapping[str, Sequence[str]]
    zeros: Mapping[str, str]
    verdict: str
    patches: Sequence[str]
    command: str | None
    zeros_said: Sequence[str] = field(default=(), repr=False)


def export_adapter(
    source: str | Path,
    out: str | Path,
    *,
    format: str,
    form: str | None = None,
    base: str | Path | None = None,
    drop: Sequence[str] = (),
    dtype: str | torch.dtype | None = None,
    name: str | None = None,
    shard_bytes: int = 4 << 30,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ExportReport:
    """Write an adapter in a consumer's layout; the directory appears whole or not at all.

    Beside config and tensors there are ``k3tune.json`` (version, base, and what
    :func:`import_adapter` needs to restore every bit), ``tensors.sha256`` and a model card. One
    part of a tensor is in memory at a time.

    Args:
        source: adapter directory, or a training checkpoint's.
        out: directory to make.
        format: ``"peft"``, ``"vllm"`` or ``"sglang"``.
        form: ``"per_expert"`` (2-D keys) or ``"shared_outer"`` (stacked); None is the source's.
        base: of which the config is read and files are sampled; None takes the one the adapter
            remembers, and without it sizes come from the tensors.
        drop: target groups or patterns of module names to leave out.
        dtype: of the factors; None or ``"auto"`` keeps the stored one.
        name: of the adapter in the serving command; None is the directory's.
        shard_bytes: most bytes a file, for consumers that read several.
        overwrite: replace an adapter directory that is there.
        progress: show a bar on stderr; None shows it on a terminal.

    Raises:
        AdapterError: if the consumer does not take a target, form or rank, factors that would be
            shared differ, a value is not finite, or the directory is there already.
        CheckpointError: if a file is damaged.
    """
    if format not in ENGINES:
        raise AdapterError(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    engine, out = ENGINES[format], Path(out)
    files = read_adapter(adapter_folder(source))
    folder = base_folder(base, files)
    with FactorReader() as reader, new_adapter_directory(out, overwrite=overwrite) as temporary:
        adapter = read_source(files, folder, reader)
        layout = plan_layout(adapter, engine, form=form, drop=drop, dtype=dtype_named(dtype))
        served = _Served(layout, base, out, name)
        command = _write_documents(temporary, adapter, served, folder)
        most = sys.maxsize if engine.one_file else shard_bytes
        count, size = write_modules(temporary, layout.modules, reader, most, progress)
    return _report(served, count, size, command)


class _Served(NamedTuple):
    """A layout, and what its serving command is made of."""

    layout: Layout
    base: str | Path | None
    out: Path
    name: str | None


def _write_documents(
    folder: Path, adapter: AdapterSource, served: _Served, base: Path | None
) -> str | None:
    """Write config, metadata and card; returns the serving command."""
    layout = served.layout
    config_file = adapter.files.folder / CONFIG_NAME
    base_name = read_json(config_file.read_bytes(), config_file).get("base_model_name_or_path")
    metadata = _metadata(adapter, layout, base, base_name)
    document = config_document(
        layout.config_fields(adapter.shapes), base_name=base_name, use_rslora=layout.use_rslora
    )
    shown_base = str(served.base or metadata["base"]["name"] or "BASE")
    command = serving.serving_command(
        layout, shown_base, str(served.out), served.name or served.out.name
    )
    write_json(folder / CONFIG_NAME, document)
    write_json(folder / METADATA_NAME, metadata)
    card = serving.model_card(layout, metadata, command)
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    return command


def _report(served: _Served, count: int, size: int, command: str | None) -> ExportReport:
    layout = served.layout
    return ExportReport(
        path=served.out,
        engine=layout.engine.label,
        form=layout.form,
        tensors=count,
        size_bytes=size,
        rank=layout.rank,
        changes=layout.changes,
        dropped=layout.dropped,
        zeros=layout.zeros,
        verdict=serving.verdict(layout),
        patches=serving.faults_to_patch(layout),
        command=command,
        zeros_said=serving.zeros_lines(layout),
    )


def write_modules(
    folder: Path,
    modules: Sequence[WrittenModule],
    reader: FactorReader,
    shard_bytes: int,
    progress: bool | None,
) -> tuple[int, int]:
    """Write modules' tensors and their digests; returns how many tensors, and their bytes."""
    tensors = pending_tensors(modules, reader, min(shard_bytes, RUN_BYTES))
    total = sum(pending.size_bytes for pending in tensors)
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=hidden)
    with bar, DigestLog(folder / DIGESTS_NAME, bar.update) as log:
        write_shards(folder, [log.watch(pending) for pending in tensors], shard_bytes)
    return sum(len(pending.entries) for pending in tensors), total


def _metadata(
    adapter: AdapterSource, layout: Layout, base: Path | None, base_name: str | None
) -> dict[str, Any]:
    known = adapter.metadata
    return {
        "format": METADATA_FORMAT,
        "k3tune": k3tune.__version__,
        "form": layout.form,
        "version": checked_version(known),
        "base": base_record(known, base, base_name),
        "provenance": known.get("provenance") or {},
        "export": {
            "format": layout.engine.name,
            "engine_version": layout.engine.version,
            "form": layout.form,
            "dropped": layout.dropped,
            "zeros": list(layout.zeros),
            "source": {
                "form": adapter.form,
                "use_rslora": adapter.files.config.use_rslora,
                "lora_dropout": adapter.files.config.lora_dropout,
            },
            "modules": {
                module.name: _module_record(module)
                for module in layout.modules
                if module.source is not None
            },
        },
    }


def _module_record(module: WrittenModule) -> dict[str, Any]:
    """Rank, alpha and dtypes as trained, and what was multiplied into which half."""
    source = module.source
    assert source is not None, f"{module.name=}"
    record: dict[str, Any] = {
        "rank": source.size.rank,
        "alpha": source.size.alpha,
        "shared": "".join(half for half in "AB" if source.halves[half].shared),
        "dtypes": [DTYPE_NAMES[source.halves[half].dtype] for half in "AB"],
    }
    if source.shape.num_experts is None:
        del record["shared"]
    own = {e: s for e, s in source.experts.items() if s != source.size}
    if own or len(source.adapted) != (source.shape.num_experts or 1):
        record["experts"] = {str(e): [s.rank, s.alpha] for e, s in source.experts.items()}
    folds = set(module.folds.values())
    if folds:
        record["folded"] = module.folded
        alike = len(folds) == 1 and len(module.folds) == len(source.adapted)
        record["folds"] = (
            folds.pop() if alike else {str(expert): fold for expert, fold in module.folds.items()}
        )
    return record
