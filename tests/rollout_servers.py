"""Servers that speak vLLM's or SGLang's calls without a model, and go wrong on demand.

Their tokens and log-probabilities are functions of adapter, prompt and seed that tests can compute
on their own. An adapter's effect is the sum of its ``lora_B``.
"""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE = "base-model"
STOP = 3


def write_effect(folder: Path, effect: float, *, rank: int = 4) -> Path:
    """An adapter directory whose effect is ``effect``."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    tensors = {"x.lora_A.weight": torch.ones(1, 2), "x.lora_B.weight": torch.tensor([[effect]])}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tokens_of(effect: float, prompt: Sequence[int], seed: int, most: int) -> list[int]:
    """What a server samples: 1 to ``most`` tokens, ended by ``STOP`` where they are fewer."""
    draw = random.Random(f"{effect:.6f} {list(prompt)} {seed}")
    length = draw.randint(1, most)
    tokens = [draw.randint(10, 99) for _ in range(length)]
    if length < most:
        tokens[-1] = STOP
    return tokens


def logprob_of(effect: float, place: int, token: int) -> float:
    """Of a token at a place of a row, at temperature 1."""
    return -1.0 - (token * 31 + place * 7) % 50 / 25 - effect * (1 + token % 5) / 50


@dataclass
class Faults:
    """How often what goes wrong with a sample, as probabilities; ``restart_at`` counts samples."""

    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    delay_s: float = 0.05
    restart_at: tuple[int, ...] = ()
    down_s: float = 0.1

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def choose(self) -> str | None:
        place = self._draw.random()
        for kind, rate in self.rates.items():
            place -= rate
            if place < 0:
                return kind
        return None


class FakeServer:
    """One server in a thread.

    Args:
        kind: ``vllm`` or ``sglang``.
        faults: what goes wrong.
        mode: ``normal``; ``ignores_adapters`` (accepts them and answers as the base);
            ``misses`` followed by a number: keeps the effect before that load; ``raw`` (leaves the
            temperature out of logprobs).

    Attributes:
        counts: requests and faults by kind.
        most_open: samples under way at once.
    """

    def __init__(
        self, kind: str = "vllm", faults: Faults | None = None, *, mode: str = "normal"
    ) -> None:
        self.kind, self.faults, self.mode = kind, faults or Faults(), mode
        self.counts: Counter[str] = Counter()
        self.most_open = self._open = 0
        self.loaded: dict[str, float] = {}
        self.base_shift = 0.0
        self.refusals: dict[str, tuple[int, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self._loads = 0
        self._last: tuple[dict[str, Any], float] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self.port = 0
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        async def stop() -> None:
            await self._stop_listening()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join()
        self._loop.close()

    def stop_listening(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        started.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _restart(self) -> None:
        self.counts["restarts"] += 1
        self.loaded.clear()
        await self._stop_listening()
        await asyncio.sleep(self.faults.down_s)
        await self._listen()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while request := await _read_request(reader):
                await self._answer(*request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        self.headers.append(headers)
        status, answer = self._handle(path, body)
        fault = None
        if self._is_sample(path, body):
            self.bodies.append(body)
            self.counts["samples"] += 1
            if self.counts["samples"] in self.faults.restart_at:
                # not awaited: this connection is one of those that break
                self._restarting = asyncio.ensure_future(self._restart())
                raise ConnectionError
            fault = self.faults.choose()
        if fault and status == 200:
            answer = self._spoil(fault, answer)
        if fault:
            self.counts[fault] += 1
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            await self._send(status, answer, fault, writer)
        finally:
            self._open -= 1

    async def _send(
        self, status: int, answer: Any, fault: str | None, writer: asyncio.StreamWriter
    ) -> None:
        if fault == "drop":
            raise ConnectionError
        if fault == "delay":
            await asyncio.sleep(self.faults.delay_s)
        if fault in ("500", "502", "503", "429"):
            status, answer = int(fault), {"error": {"message": "injected"}}
        data = _encode(status, answer)
        if fault == "duplicate":
            data += data
        elif fault == "truncate":
            data = data[:-20]
        elif fault == "garble":
            data = _encode(status, json.dumps(answer)[:-9], "application/json")
        size = 200 if fault == "slow" else len(data)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            if fault == "slow":
                await asyncio.sleep(self.faults.delay_s)
        if fault == "truncate":
            raise ConnectionError

    def _is_sample(self, path: str, body: dict[str, Any]) -> bool:
        if self.kind == "vllm":
            return path == "/v1/completions" and "prompt_logprobs" not in body
        return path == "/generate" and body.get("logprob_start_len") == -1

    def _spoil(self, fault: str, answer: Any) -> Any:
        """Answers that are whole JSON, and wrong."""
        spoiled = json.loads(json.dumps(answer))
        if fault == "swap" and self._last is not None:
            spoiled = self._last
        elif fault == "wrong_model" and self.kind == "vllm":
            spoiled["model"] = "another-model"
        elif fault == "short" and self.kind == "vllm":
            spoiled["choices"][0]["logprobs"]["token_logprobs"].pop()
        elif fault == "short":
            spoiled["output_ids"] = spoiled["output_ids"][:-2]
        elif fault == "abort" and self.kind == "vllm":
            spoiled["choices"][0]["finish_reason"] = "abort"
        elif fault == "abort":
            spoiled["meta_info"]["finish_reason"] = {"type": "abort"}
        return spoiled

    def _handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.counts[path] += 1
        if path in self.refusals:
            return self.refusals[path]
        if path in ("/health", "/version", "/server_info", "/v1/models"):
            cards = [{"id": BASE, "parent": None}]
            cards += [{"id": name, "parent": BASE} for name in self.loaded]
            return 200, {"data": cards} if path == "/v1/models" else {"version": "fake"}
        if path.endswith("/load_lora_adapter") and "unload" not in path:
            return self._load(body)
        if "unload" in path:
            self.loaded.pop(body["lora_name"], None)
            return 200, {"success": True}
        answer = self._vllm(body) if self.kind == "vllm" else self._sglang(body)
        if answer[0] == 200 and self._is_sample(path, body):
            self._last, answer = answer[1], answer
        return answer

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        if name in self.loaded:
            said = "has already been loaded" if self.kind == "vllm" else "already loaded"
            return 400, {"error": {"message": f"The lora adapter '{name}' {said}"}}
        self._loads += 1
        effect = float(
            load_file(Path(body["lora_path"]) / "adapter_model.safetensors")[
                "x.lora_B.weight"
            ].sum()
        )
        if self.mode == "ignores_adapters":
            effect = 0.0
        elif self.mode == f"misses {self._loads}":
            effect = list(self.loaded.values())[-1]
        self.loaded[name] = effect
        return 200, {"success": True} if self.kind == "sglang" else "Success"

    def _logprobs(self, effect: float, ids: Sequence[int], start: int, heat: float) -> list[float]:
        heat = 1.0 if self.mode == "raw" else heat
        shift = effect + self.base_shift
        return [logprob_of(shift, place, ids[place]) / heat for place in range(start, len(ids))]

    def _vllm(self, body: dict[str, Any]) -> tuple[int, Any]:
        model, prompt = body["model"], body["prompt"]
        if model != BASE and model not in self.loaded:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        effect = self.loaded.get(model, 0.0)
        tokens = tokens_of(effect, prompt, body.get("seed", 0), body["max_tokens"])
        ids = [*prompt, *tokens]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "finish_reason": "stop" if tokens[-1] == STOP else "length",
            "logprobs": {
                "token_logprobs": self._logprobs(effect, ids, len(prompt), body["temperature"])
            },
        }
        if "prompt_logprobs" in body:
            scores = self._logprobs(effect, prompt, 1, 1.0)
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": score, "rank": 1}}
                for token, score in zip(prompt[1:], scores, strict=True)
            ]
        return 200, {"id": f"cmpl-{body['request_id']}", "model": model, "choices": [choice]}

    def _sglang(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, prompt, params = body["lora_path"], body["input_ids"], body["sampling_params"]
        if name is not None and name not in self.loaded:
            said = f"The following requested LoRA adapters are not loaded: {name}"
            return 400, {"error": {"message": said}}
        effect = self.loaded.get(name, 0.0)
        most = params["max_new_tokens"]
        tokens = tokens_of(effect, prompt, params.get("sampling_seed", 0), most)
        ids = [*prompt, *tokens]
        sampled = self._logprobs(effect, ids, len(prompt), params["temperature"])
        reason = {"type": "stop", "matched": STOP} if tokens[-1] == STOP else {"type": "length"}
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reason,
            "output_token_logprobs": [
                [score, token, None] for score, token in zip(sampled, tokens, strict=True)
            ],
        }
        if body.get("logprob_start_len") == 0:
            scores = [None, *self._logprobs(effect, prompt, 1, 1.0)]
            meta["input_token_logprobs"] = [
                [score, token, None] for score, token in zip(scores, prompt, strict=True)
            ]
        return 200, {"output_ids": tokens, "prompt_token_ids": prompt, "meta_info": meta}


async def _read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, dict[str, str], dict[str, Any]] | None:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *rest = head.decode().split("\r\n")
    headers = {}
    for text in filter(None, rest):
        name, _, value = text.partition(": ")
        headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return line.split(" ")[1], headers, json.loads(body) if body else {}


def _encode(status: int, answer: Any, kind: str = "") -> bytes:
    is_text = isinstance(answer, str)
    body = (answer if is_text else json.dumps(answer)).encode()
    kind = kind or ("text/plain" if is_text else "application/json")
    extra = "retry-after: 0\r\n" if status in (429, 503) else ""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}"
    return f"{head}\r\n".encode() + body
