"""Servers in a thread of the tests' process, or in a process of their own."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from checkpoints import build_checkpoint
from command_line import make_text_base
from k3tune.data import K3Tokenizer
from k3tune.lora import LoraSpec, adapter_parameters, attach_lora, save_adapter
from k3tune.model import load_base
from k3tune.serve.limits import Limits
from k3tune.serve.run import ServeOptions, build_app

TARGETS = ("attention", "latent", "experts", "shared_experts", "dense")
NAME = "tiny"
COMMAND = "import sys; from k3tune.cli import main; main(sys.argv[1:])"
ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


@dataclass
class Running:
    """A server that answers at ``url``; ``under_way`` counts what its worker has to do."""

    url: str
    worker: Any
    server: uvicorn.Server
    thread: threading.Thread

    @property
    def under_way(self) -> int:
        return self.worker._under_way

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 30
        while self.under_way or self.worker._rows:
            assert time.monotonic() < deadline, "the worker still has rows"
            time.sleep(0.01)


def make_folders(root: Path) -> Path:
    checkpoint = build_checkpoint(
        root / "checkpoint",
        num_hidden_layers=3,
        hidden_size=48,
        num_experts=5,
        vocab_size=320,
    )
    make_text_base(checkpoint, root / "base")
    for seed, folder in enumerate(("adapters/one", "adapters/two", "outside")):
        model = attach_lora(load(root), LoraSpec(targets=TARGETS, rank=2, alpha=4))
        torch.manual_seed(seed)
        with torch.no_grad():
            for group in adapter_parameters(model).values():
                for factor in group.values():
                    factor.normal_(std=0.1)
        save_adapter(model, root / folder, dtype=torch.float32, base_fingerprint="unknown")
    return root


def load(root: Path) -> Any:
    return load_base(root / "base", dtype=torch.float32, kernels="reference")


@contextmanager
def start(
    root: Path,
    *,
    adapters: Mapping[str, Path] | None = None,
    with_root: bool = True,
    routing: bool = False,
    token: str | None = None,
    tokenizer: bool = True,
    **limits: Any,
) -> Iterator[Running]:
    """Serve the base of ``root`` on a free port."""
    options = ServeOptions(
        NAME,
        adapters=adapters or {},
        adapter_root=root / "adapters" if with_root else None,
        return_routing=routing,
        limits=Limits(**{"max_model_len": 1024, **limits}),
    )
    reader = K3Tokenizer.from_pretrained(root / "base") if tokenizer else None
    app = build_app(load(root), reader, options, token)
    config = uvicorn.Config(
        app, port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    endpoint = next(route.app for route in app.routes if route.path == "/health")
    try:
        yield Running(f"http://127.0.0.1:{port}", endpoint._service.worker, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def process(
    repository: Path, *arguments: object, port: int = 0
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process; what it prints is read to its end."""
    environment = os.environ | {"PYTHONPATH": f"{repository}:{repository / 'kernels'}"}
    command = [sys.executable, "-c", COMMAND, "serve", *map(str, arguments), "--port", str(port)]
    started = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert started.stderr is not None
    said = []
    try:
        for line in started.stderr:
            said.append(line)
            found = ADDRESS.search(line)
            if found:
                break
        else:
            pytest.fail("".join(said))
        rest = threading.Thread(target=started.stderr.read, daemon=True)
        rest.start()
        yield found[1], started
    finally:
        started.terminate()
        started.wait(60)
