"""What a command runs on: the base, an adapter over it, the base's tokenizer.

What needs few bytes is checked first, so that a mistake is not answered after minutes of loading.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from k3tune.commands.options import Model
from k3tune.errors import K3TuneError
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.hub import resolve_checkpoint

if TYPE_CHECKING:
    from k3tune.data.tokenizer import K3Tokenizer
    from k3tune.lora.read import AdapterFiles
    from k3tune.model.modeling import K3ForCausalLM

# A larger base is told apart by its name: hashing it would take longer than a user waits.
_HASHED_BYTES = 2 << 30


def read_architecture(base: str) -> Architecture:
    """What the base's config says; no weight is read."""
    return parse_config(read_config(resolve_checkpoint(base, weights=False)))


def check_adapter(folder: Path, architecture: Architecture) -> "AdapterFiles":
    """Hold an adapter's headers against the base's config; no weight is read.

    Raises:
        AdapterError, CheckpointError: if it cannot be read, or is one of another base.
    """
    from k3tune.lora.modules import module_shapes
    from k3tune.lora.plan import match_tensors
    from k3tune.lora.read import read_adapter

    files = read_adapter(folder)
    match_tensors(files, module_shapes(architecture))
    return files


def load_model(options: Model) -> "K3ForCausalLM":
    """Load the base, with the adapter if one is named, onto the GPU if there is one.

    Raises:
        K3TuneError: if the base or the adapter is not usable, or they do not fit.
    """
    import torch

    from k3tune.lora.load import load_adapter
    from k3tune.model.checkpoint import load_base

    files = None
    if options.adapter is not None:
        files = check_adapter(options.adapter, read_architecture(options.base))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model = load_base(
        options.base, dtype=getattr(torch, dtype), device=device, kernels=options.kernels
    )
    if files is not None:
        _compare_base(files, options.base, model, dtype)
        # the base's own object, adapted in place, is what the library's functions take
        load_adapter(model, files.folder)
    return model


def load_tokenizer(
    base: str, architecture: Architecture, otherwise: str | None = None
) -> "K3Tokenizer":
    """The tokenizer that lies beside the base.

    Args:
        base: as the user names it.
        architecture: of the base.
        otherwise: what a user without the files can do; the end of a sentence.

    Raises:
        ConfigError: if there is none, or it has ids the base does not have.
        CheckpointError: if its files are damaged.
    """
    from k3tune.data import loading

    return loading.load_tokenizer(base, architecture.vocab_size, otherwise)


@contextmanager
def insisting_on(kernels: str) -> Iterator[None]:
    """Turn what an op says of the backend asked for into an error of the command line."""
    try:
        yield
    except ValueError as error:
        if kernels == "auto" or isinstance(error, K3TuneError):
            raise
        raise K3TuneError(f"--kernels {kernels}: {error}") from error


def warn(sentence: str) -> None:
    """Say something on stderr that does not stop the command."""
    typer.echo(f"warning: {sentence}", err=True)


def _compare_base(files: "AdapterFiles", base: str, model: "K3ForCausalLM", dtype: str) -> None:
    """Warn if the adapter says it was trained on another base: by content, or else by name."""
    said = (files.metadata or {}).get("base")
    said = said if isinstance(said, dict) else {}
    name = said.get("name") or _named_base(files)
    fingerprint, trained_dtype = str(said.get("fingerprint")), said.get("dtype")
    found = None
    if fingerprint.startswith("sha256:") and trained_dtype in ("bfloat16", "float32"):
        found = _fingerprint(base, model, dtype, trained_dtype)
    if found is not None and found != fingerprint:
        warn(
            f"{files.folder} was trained on another base than {base}: on {name or 'one unnamed'} "
            f"with fingerprint {fingerprint[:19]}..., this one has {found[:19]}..."
        )
    elif found is None and name and Path(name).name != Path(base).name:
        warn(f"{files.folder} says it was trained on {name}, and {base} may be another base")


def _named_base(files: "AdapterFiles") -> str | None:
    from k3tune.lora.keys import CONFIG_NAME

    name = json.loads((files.folder / CONFIG_NAME).read_bytes()).get("base_model_name_or_path")
    return name if isinstance(name, str) else None


def _fingerprint(base: str, model: "K3ForCausalLM", dtype: str, wanted: str) -> str | None:
    """The base's fingerprint as it is when loaded in ``wanted``; None where that takes long."""
    import torch

    from k3tune.lora.fingerprint import base_fingerprint
    from k3tune.model.checkpoint import load_base

    assert model.load_report is not None, "load_base leaves a report"
    if model.load_report.bytes_read > _HASHED_BYTES:
        return None
    if wanted != dtype:
        model = load_base(base, dtype=getattr(torch, wanted))
    return base_fingerprint(model)
