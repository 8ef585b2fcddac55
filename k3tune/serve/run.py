"""Puts a server together from a base, and runs it until it is told to stop."""

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from k3tune import __version__
from k3tune.data.tokenizer import K3Tokenizer
from k3tune.errors import ConfigError
from k3tune.model.modeling import K3ForCausalLM
from k3tune.rl.engines.http import is_loopback
from k3tune.rl.numerics import Activations, activation_rounding
from k3tune.serve.adapters import AdaptedModel
from k3tune.serve.app import make_app
from k3tune.serve.completions import Service
from k3tune.serve.limits import Limits
from k3tune.serve.registry import Registry
from k3tune.serve.requests import Model
from k3tune.serve.worker import Worker

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "K3TUNE_API_TOKEN"


@dataclass(frozen=True)
class ServeOptions:
    """What a server is started with.

    Attributes:
        base_name: what requests call the base.
        adapters: folders by the names requests call them.
        adapter_root: folder that adapters may be loaded from while it runs; None allows none.
        activations: rounding of the experts' inputs.
        return_routing: put the routed experts into answers.
        host, port: where it listens; port 0 takes a free one.
        limits: of requests.
        numerics: more of what a floor depends on, for ``/version``.

    Raises:
        ConfigError: if the root is no folder, or an adapter has the base's name.
    """

    base_name: str
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapter_root: Path | None = None
    activations: Activations = "none"
    return_routing: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    numerics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise ConfigError(
                f"--adapter-root is {self.adapter_root}, expected a folder: make it first"
            )
        if self.base_name in self.adapters:
            raise ConfigError(
                f"two models are called {self.base_name}: give the adapter another name, or the "
                "base one with --served-name"
            )


def build_app(
    base: K3ForCausalLM, tokenizer: K3Tokenizer | None, options: ServeOptions, token: str | None
) -> Starlette:
    """The application over a base; its adapters are loaded here, so that mistakes show at once.

    Args:
        base: without adapters; it belongs to the server from now on.
        tokenizer: of the base; None serves token ids only.
        options: of the server.
        token: bearer token that requests must have; None asks for none.

    Raises:
        AdapterError, CheckpointError: if an adapter is not usable.
    """
    base.eval()
    adapted = AdaptedModel(base)
    worker = Worker(adapted, options.limits, return_routing=options.return_routing)
    registry = Registry(options.base_name, worker, options.adapter_root, options.limits)
    for name, folder in options.adapters.items():
        registry.preload(name, folder, adapted)
    architecture = base.model.architecture
    stops = _end_ids(base)
    chat_stops = () if tokenizer is None else tuple(tokenizer.stop_token_ids)
    service = Service(
        model=Model(
            architecture.vocab_size, stops, tuple(dict.fromkeys(stops + chat_stops)), options.limits
        ),
        architecture=architecture,
        tokenizer=tokenizer,
        registry=registry,
        worker=worker,
        returns_routing=options.return_routing,
        numerics=_numerics(base, options),
    )
    return make_app(service, options.limits, token)


def run(base: K3ForCausalLM, tokenizer: K3Tokenizer | None, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; running requests get ``shutdown_timeout_s`` to end.

    The bearer token is that of the environment variable ``K3TUNE_API_TOKEN``; it is never printed.

    Raises:
        AdapterError, CheckpointError: as :func:`build_app`.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip() or None
    if not is_loopback(options.host):
        logger.warning(
            "%s is open to other machines, over plain HTTP%s: put a TLS proxy in front, or listen "
            "on 127.0.0.1",
            options.host,
            "" if token else f" and without a token ({TOKEN_VARIABLE} is not set)",
        )
    with ExitStack() as stack:
        stack.enter_context(activation_rounding(base, options.activations))
        app = build_app(base, tokenizer, options, token)
        most = options.limits.max_batch_size + options.limits.max_waiting
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="info",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            # beyond the queue's own answer, for connections that ask for nothing
            limit_concurrency=2 * most + 64,
            timeout_graceful_shutdown=options.limits.shutdown_timeout_s,
        )
        try:
            uvicorn.Server(config).run()
        except KeyboardInterrupt:
            # Ctrl-C is how it is stopped
            return


def check_address(host: str, port: int) -> None:
    """Try to listen, before a base is read for minutes.

    Raises:
        ConfigError: if the host is no address of this machine, or the port is taken or not allowed.
    """
    place = f"--host {host!r} --port {port}"
    if not host:
        raise ConfigError(f"{place}: expected an address, such as 127.0.0.1 or 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{place}: expected an address of this machine and a free port, and cannot listen "
            f"there ({error}): choose others"
        ) from error


def _end_ids(base: K3ForCausalLM) -> tuple[int, ...]:
    """Ids that end a text, as the checkpoint says."""
    eos = base.generation_config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _numerics(base: K3ForCausalLM, options: ServeOptions) -> dict[str, Any]:
    weight = base.lm_head.weight
    return {
        "server": "k3tune serve",
        "version": __version__,
        "torch": str(torch.__version__),
        "device": weight.device.type,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "activations": options.activations,
        **options.numerics,
    }
