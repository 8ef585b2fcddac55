"""Read an adapter out of any layout it may be served in, back to k3tune's own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import k3tune
from k3tune.errors import AdapterError
from k3tune.lora.config_file import config_document
from k3tune.lora.directory import new_adapter_directory
from k3tune.lora.export.banks import bank_keys, read_banks
from k3tune.lora.export.base_record import base_record
from k3tune.lora.export.capabilities import PEFT
from k3tune.lora.export.exporting import write_modules
from k3tune.lora.export.factors import (
    AdapterSource,
    Half,
    ModuleFactors,
    adapter_folder,
    base_folder,
    checked_version,
    read_source,
    renamed,
)
from k3tune.lora.export.layout import SHARED_HALF, check_shared
from k3tune.lora.export.stream import DIGESTS_NAME
from k3tune.lora.export.written import SERVED_LEAVES, Layout, WrittenModule
from k3tune.lora.keys import CONFIG_NAME, METADATA_FORMAT, METADATA_NAME
from k3tune.lora.modules import ModuleShape, module_shapes
from k3tune.lora.read import AdapterFiles, FactorReader, read_adapter
from k3tune.lora.shards import DTYPE_NAMES, write_json
from k3tune.lora.spec import FORMS
from k3tune.lora.targets import RankAlpha
from k3tune.published.architecture import parse_config, read_config
from k3tune.published.safetensors_files import read_json

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PUBLISHED_LEAVES = {served: leaf for leaf, served in SERVED_LEAVES.items()}
_SERVED_KEY = re.compile(rf"(.*\.experts\.(?:\d+\.)?)({'|'.join(_PUBLISHED_LEAVES)})(\.lora_.*)")


@dataclass(frozen=True)
class ImportReport:
    """What an import read and wrote.

    Attributes:
        path: the directory.
        form: of the experts' factors; None without experts.
        modules, tensors: how many were written.
        restored: whether the trained ranks, scales and dtypes were known and put back.
        dropped: modules the export had left out.
    """

    path: Path
    form: str | None
    modules: int
    tensors: int
    restored: bool
    dropped: Mapping[str, list[str]]


def import_adapter(
    path: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    form: str | None = None,
    shard_bytes: int = 4 << 30,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ImportReport:
    """Read an adapter in a served layout and write it as :func:`save_adapter` would.

    Understood are experts by 2-D keys, stacked (shared or not), named w1/w3/w2 or
    gate_proj/up_proj/down_proj, and PEFT's 3-D banks in both role orders, told by their shapes.
    What :func:`export_adapter` wrote comes back as it was trained, bit by bit, apart from what it
    was told to drop.

    Args:
        path: the directory.
        out: directory to make.
        base: the base, whose config tells sizes; None takes the one the adapter remembers, and
            without it sizes come from the tensors.
        form: ``"per_expert"`` or ``"shared_outer"``, which needs equal factors; None is what was
            exported, or else what is found.
        shard_bytes: most bytes a file.
        overwrite: replace an adapter directory that is there.
        progress: show a bar on stderr; None shows it on a terminal.

    Raises:
        AdapterError: if the layout is none of these, or factors to be shared differ.
        CheckpointError: if a file is damaged.
    """
    if form is not None and form not in FORMS:
        raise AdapterError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    files = read_adapter(adapter_folder(path), banks=True)
    folder = base_folder(base, files)
    with FactorReader() as reader, new_adapter_directory(out, overwrite=overwrite) as temporary:
        source = read_any(files, folder, reader)
        record = source.metadata.get("export")
        if record is not None:
            source = restored(source, record)
        modules = {
            name: _formed(name, factors, form, record) for name, factors in source.modules.items()
        }
        source = replace(source, modules=modules)
        config = read_json((files.folder / CONFIG_NAME).read_bytes(), files.folder / CONFIG_NAME)
        base_name = config.get("base_model_name_or_path")
        layout = Layout(PEFT, source.form, [_native(n, f) for n, f in modules.items()])
        document = config_document(
            layout.config_fields(source.shapes),
            base_name=base_name,
            use_rslora=source.files.config.use_rslora,
            dropout=source.files.config.lora_dropout,
        )
        write_json(temporary / CONFIG_NAME, document)
        write_json(temporary / METADATA_NAME, _metadata(source, folder, base_name))
        count, _ = write_modules(temporary, layout.modules, reader, shard_bytes, progress)
        (temporary / DIGESTS_NAME).unlink()
    dropped = (record or {}).get("dropped", {})
    return ImportReport(Path(out), source.form, len(modules), count, record is not None, dropped)


def read_any(files: AdapterFiles, base: Path | None, reader: FactorReader) -> AdapterSource:
    """Factors of an adapter in any layout, as its files have them."""
    banks = bank_keys(files)
    plain = {key: stored for key, stored in files.tensors.items() if key not in banks}
    rest = renamed(
        replace(files, tensors=plain),
        {
            key: f"{match[1]}{_PUBLISHED_LEAVES[match[2]]}{match[3]}"
            for key in plain
            if (match := _SERVED_KEY.fullmatch(key)) and "shared_experts" not in match[1]
        },
    )
    if not banks:
        return read_source(rest, base, reader)
    shapes: dict[str, ModuleShape] = {}
    if base is not None:
        shapes = module_shapes(parse_config(read_config(base)))
    only_banks = replace(files, tensors={key: files.tensors[key] for key in banks})
    modules = read_banks(only_banks, shapes, reader)
    if plain:
        linear = read_source(rest, base, reader)
        modules = {**linear.modules, **modules}
        shapes = shapes or dict(linear.shapes)
    shapes = {**{name: factors.shape for name, factors in modules.items()}, **shapes}
    ordered = {name: modules[name] for name in shapes if name in modules}
    return AdapterSource(files, ordered, shapes)


def restored(source: AdapterSource, record: Mapping[str, Any]) -> AdapterSource:
    """The adapter as it was trained, by what its export wrote down."""
    zeros = set(record["zeros"])
    trained = record["modules"]
    modules = {
        name: _restored_module(factors, trained[name])
        for name, factors in source.modules.items()
        if name not in zeros and name in trained
    }
    if unknown := source.modules.keys() - zeros - trained.keys():
        raise AdapterError(
            f"{source.files.folder}: {METADATA_NAME} knows nothing of {min(unknown)}, which has "
            "tensors: files of two adapters?"
        )
    config = replace(
        source.files.config,
        use_rslora=record["source"]["use_rslora"],
        lora_dropout=record["source"]["lora_dropout"],
    )
    return replace(source, files=replace(source.files, config=config), modules=modules)


def _restored_module(factors: ModuleFactors, record: Mapping[str, Any]) -> ModuleFactors:
    size = RankAlpha(record["rank"], record["alpha"])
    experts = {int(e): RankAlpha(*own) for e, own in record.get("experts", {}).items()}
    folds = record.get("folds", 1.0)

    def fold_of(expert: int | None) -> float:
        # one number for all, or one of each expert that has any
        return folds.get(str(expert), 1.0) if isinstance(folds, dict) else folds

    halves = {}
    for place, half in enumerate("AB"):
        found = factors.halves[half]
        dtype = _DTYPES[record["dtypes"][place]]
        if dtype.itemsize >= found.dtype.itemsize:
            dtype = found.dtype

        def read(
            expert: int | None,
            half: str = half,
            found: Half = found,
            dtype: Any = dtype,
        ) -> Tensor:
            value = found.read(expert)
            if half == record.get("folded"):
                value = value.double() / fold_of(expert)
            rank = experts.get(expert, size).rank if expert is not None else size.rank
            return (value[:rank] if half == "A" else value[:, :rank]).to(dtype).contiguous()

        halves[half] = Half(found.shared, dtype, read)
    return ModuleFactors(factors.shape, halves, size, experts)


def _formed(
    name: str, factors: ModuleFactors, form: str | None, record: Mapping[str, Any] | None
) -> ModuleFactors:
    """The module with the halves shared that are to be."""
    if factors.form is None:
        return factors
    shared = "".join(half for half in "AB" if factors.halves[half].shared)
    if form is not None:
        shared = SHARED_HALF[name.rpartition(".")[2]] if form == "shared_outer" else ""
    elif record is not None:
        shared = record["modules"][name]["shared"]
    halves = {}
    for half, found in factors.halves.items():
        if half in shared and not found.shared:
            check_shared(name, factors, half)
        first = factors.adapted[0]

        def read_first(_: int | None, found: Half = found, first: int | None = first) -> Tensor:
            return found.read(first)

        if (half in shared) != found.shared:
            read = read_first if half in shared else found.read
            found = replace(found, shared=half in shared, read=read, place=None, whole=None)
        halves[half] = found
    return replace(factors, halves=halves)


def _native(name: str, factors: ModuleFactors) -> WrittenModule:
    """A module as :func:`k3tune.lora.save.save_adapter` writes it."""
    total = factors.shape.num_experts
    alike = not factors.experts or (
        set(factors.experts.values()) == {factors.size} and len(factors.experts) == total
    )
    shared = "".join(half for half in "AB" if total is not None and factors.halves[half].shared)
    return WrittenModule(
        name=name,
        shape=factors.shape,
        source=factors,
        shared=shared,
        stacked=alike and total is not None,
        size=factors.size,
        sizes={} if alike else dict(factors.experts),
        folds={},
        folded="B",
        dtypes={half: found.dtype for half, found in factors.halves.items()},
    )


def _metadata(source: AdapterSource, base: Path | None, base_name: str | None) -> dict[str, Any]:
    known = source.metadata
    return {
        "format": METADATA_FORMAT,
        "k3tune": k3tune.__version__,
        "form": source.form,
        "version": checked_version(known),
        "base": base_record(known, base, base_name),
        "provenance": known.get("provenance") or {},
    }
