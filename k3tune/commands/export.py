"""``k3tune export``, ``import`` and ``verify``: adapters to where they are served, and proved."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from k3tune.commands.flags import DtypeName, Json, Kernels

if TYPE_CHECKING:
    from k3tune.lora.export.exporting import ExportReport
    from k3tune.lora.export.verifying import Verification

Out = Annotated[Path, typer.Option(help="Folder to make.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an adapter that is there already.")
]
BaseHint = Annotated[
    str | None,
    typer.Option(help="The base (folder or hub id), where the adapter does not remember it."),
]
Form = Annotated[
    Literal["per_expert", "shared_outer"] | None,
    typer.Option(help="Experts by 2-D keys, or stacked with shared outer factors."),
]


def export(
    source: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Its folder, or a training checkpoint's.")
    ],
    out: Out,
    format: Annotated[
        Literal["peft", "vllm", "sglang", "merged"],
        typer.Option(help="Who reads the result; merged is refused, with what it would lose."),
    ],
    form: Form = None,
    base: BaseHint = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGETS",
            help="What to leave out, by group or name, with commas; may be repeated.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of the factors; auto keeps the stored one."),
    ] = "auto",
    name: Annotated[
        str | None, typer.Option(help="The adapter's name in the serving command.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write an adapter in the layout a server reads.

    The base is not touched. What the server drops or refuses is an error unless --drop names it.
    """
    if format == "merged":
        from k3tune.lora.export.merging import refuse_merge

        raise refuse_merge(source, base)
    from k3tune.files import refuse_same_file
    from k3tune.lora import export_adapter
    from k3tune.lora.export.factors import adapter_folder

    # what was trained is not to be replaced by what a server reads
    refuse_same_file(adapter_folder(source), out)
    report = export_adapter(
        source,
        out,
        format=format,
        form=form,
        base=base,
        drop=[word.strip() for words in drop or () for word in words.split(",") if word.strip()],
        dtype=dtype,
        name=name,
        overwrite=overwrite,
        progress=False if as_json else None,
    )
    typer.echo(json.dumps(_plain(report), indent=2) if as_json else _export_text(report))


def import_(
    path: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Its folder, in any served layout.")
    ],
    out: Out,
    base: BaseHint = None,
    form: Form = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Read an adapter out of a served layout.

    PEFT's per-expert and 3-D forms, and the stacked ones of vLLM and SGLang, become k3tune's own.
    """
    from k3tune.files import refuse_same_file
    from k3tune.lora import import_adapter

    refuse_same_file(path, out)
    report = import_adapter(
        path,
        out,
        base=base,
        form=form,
        overwrite=overwrite,
        progress=False if as_json else None,
    )
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2))
        return
    lines = [f"{report.path}: {report.modules} modules in {report.tensors} tensors"]
    if report.form is not None:
        lines.append(f"form of the experts' factors: {report.form}")
    if report.restored:
        lines.append("ranks, scales and dtypes are those of the training, as k3tune.json has them")
    lines += [f"left out by the export: {target}" for target in report.dropped]
    typer.echo("\n".join(lines))


def verify(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Its folder.")],
    base: Annotated[str, typer.Option(help="Checkpoint folder, or a hub id such as org/name.")],
    against: Annotated[
        Path | None, typer.Option(help="What was trained: adapter folder or training checkpoint.")
    ] = None,
    base_unchanged: Annotated[
        Path | None,
        typer.Option(help="Output of sha256sum in the base's folder, to compare its files with."),
    ] = None,
    expect_version: Annotated[
        int | None, typer.Option(help="Version the adapter must have.")
    ] = None,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
    as_json: Json = False,
) -> None:
    """Prove that an adapter's files are what was trained.

    Structure, values as the server reads them, and the model's answers. Exits with 1 and the
    faults' names if anything is wrong.
    """
    from k3tune.lora import verify as verify_adapter

    found = verify_adapter(
        adapter,
        base,
        against=against,
        base_unchanged=base_unchanged,
        expect_version=expect_version,
        dtype=dtype,
        kernels=kernels,
    )
    typer.echo(found.to_json() if as_json else _verify_text(found))
    if not found.ok:
        raise typer.Exit(1)


def _plain(report: Any) -> dict[str, Any]:
    content = asdict(report)
    content["path"] = str(report.path)
    return content


def _export_text(report: "ExportReport") -> str:
    lines = [
        f"{report.path}: {report.tensors} tensors, {report.size_bytes / 1e6:.1f} MB, rank up to "
        f"{report.rank}, for {report.engine}",
        f"form of the experts' factors: {report.form or 'no experts adapted'}",
    ]
    lines += [f"changed: {change}" for change in report.changes]
    lines += [f"left out: {target} ({len(names)})" for target, names in report.dropped.items()]
    lines += [f"written as zeros: {line}" for line in report.zeros_said]
    lines += [f"{report.verdict}", *(f"  to patch: {patch}" for patch in report.patches)]
    if report.command is not None:
        lines += ["serve with:", f"  {report.command}"]
    return "\n".join(lines)


def _verify_text(found: "Verification") -> str:
    lines = [f"checked: {line}" for line in found.checks]
    lines += [f"not checked: {line}" for line in found.skipped]
    lines += [f"FAULT {fault}" for fault in found.faults]
    count = len(found.faults)
    lines.append("no fault found" if found.ok else f"{count} fault{'s' * (count > 1)} found")
    return "\n".join(lines)
