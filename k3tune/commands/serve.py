"""``k3tune serve``: a base and its adapters over HTTP."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from k3tune.commands.flags import Base, DtypeName, Kernels
from k3tune.errors import ConfigError, K3TuneError

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="Adapter to serve, by default under its folder's name; may be repeated.",
    ),
]
AdapterRoot = Annotated[
    Path | None, typer.Option(help="Folder that clients may load adapters from; none otherwise.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0 takes a free one.")]
ServedName = Annotated[
    str | None, typer.Option(help="What requests call the base; its folder's name otherwise.")
]
MaxModelLen = Annotated[
    int, typer.Option(min=2, help="Most tokens of a prompt and its completion.")
]
MaxBatchSize = Annotated[int, typer.Option(min=1, help="Rows that are sampled together.")]
MaxWaiting = Annotated[
    int, typer.Option(min=1, help="Requests that may wait; more are told to come back.")
]
MaxAdapters = Annotated[int, typer.Option(min=1, help="Adapters loaded at once.")]
MaxBodyBytes = Annotated[int, typer.Option(min=1, help="Longest body of a request.")]
ShutdownTimeout = Annotated[
    int, typer.Option(min=1, help="Seconds that running requests get when it is stopped.")
]
Activations = Annotated[
    Literal["none", "bf16", "mxfp8"],
    typer.Option(help="Rounding of the experts' inputs, as other servers do it."),
]


def serve(
    base: Base,
    adapters: Adapters = None,
    adapter_root: AdapterRoot = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
    served_name: ServedName = None,
    max_model_len: MaxModelLen = 32768,
    max_batch_size: MaxBatchSize = 64,
    max_waiting: MaxWaiting = 256,
    max_adapters: MaxAdapters = 8,
    max_body_bytes: MaxBodyBytes = 8 << 20,
    shutdown_timeout: ShutdownTimeout = 30,
    activations: Activations = "none",
    return_routed_experts: Annotated[
        bool, typer.Option("--return-routed-experts", help="Put each token's experts into answers.")
    ] = False,
    dtype: DtypeName = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Serve a base and its adapters over HTTP.

    It speaks the part of vLLM's HTTP API that OpenAI clients and k3tune's own rollouts use.
    Requests need the bearer token in the environment variable K3TUNE_API_TOKEN, if it is set.
    """
    limits = {
        "max_body_bytes": max_body_bytes,
        "max_model_len": max_model_len,
        "max_batch_size": max_batch_size,
        "max_waiting": max_waiting,
        "max_adapters": max_adapters,
        "shutdown_timeout_s": shutdown_timeout,
    }
    options = {
        "base_name": served_name or Path(base).absolute().name,
        "adapters": adapters_by_name(adapters or []),
        "adapter_root": adapter_root,
        "activations": activations,
        "return_routing": return_routed_experts,
        "host": host,
        "port": port,
        "numerics": {"kernels": kernels},
    }
    _serve(base, dtype, kernels, options, limits)


def adapters_by_name(given: list[str]) -> dict[str, Path]:
    """``name=folder``, or a folder, whose own name it then gets.

    Raises:
        K3TuneError: if two have one name, or one has none.
    """
    named: dict[str, Path] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if not separator:
            name, folder = Path(text).absolute().name, text
        if not name or not folder or name in named:
            raise K3TuneError(f"--adapter {text}: expected name=folder or a folder, each name once")
        named[name] = Path(folder)
    return named


def _serve(
    base: str, dtype: str, kernels: str, options: dict[str, Any], limits: dict[str, int]
) -> None:
    try:
        from k3tune.serve.limits import Limits
        from k3tune.serve.run import ServeOptions, check_address, run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'k3tune serve needs {error.name}: pip install "k3tune[serve]"'
        ) from error
    from k3tune.commands import loading
    from k3tune.commands.options import Model

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    checked = ServeOptions(**options, limits=Limits(**limits))
    check_address(checked.host, checked.port)
    tokenizer = None
    architecture = loading.read_architecture(base)
    for folder in checked.adapters.values():
        loading.check_adapter(folder, architecture)
    try:
        tokenizer = loading.load_tokenizer(base, architecture)
    except ConfigError as error:
        loading.warn(f"{error}; only token ids are served")
    run(loading.load_model(Model(base, None, dtype, kernels)), tokenizer, checked)
