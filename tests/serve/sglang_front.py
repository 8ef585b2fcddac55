"""SGLang's calls over ``k3tune serve``, so that its client meets a model and not a script."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Front:
    """Translates calls; ``url`` is a server's that speaks vLLM's."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)

    async def models(self, _: Request) -> Response:
        return JSONResponse((await self._client.get("/v1/models")).json())

    async def info(self, _: Request) -> Response:
        return JSONResponse((await self._client.get("/version")).json())

    async def health(self, _: Request) -> Response:
        return Response(status_code=(await self._client.get("/health")).status_code)

    async def load(self, request: Request) -> Response:
        return await self._adapters("/v1/load_lora_adapter", request)

    async def unload(self, request: Request) -> Response:
        return await self._adapters("/v1/unload_lora_adapter", request)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        scores = body["logprob_start_len"] == 0
        answer = await self._client.post("/v1/completions", json=completion(body, scores))
        if answer.status_code == 404:
            said = f"The following requested LoRA adapters are not loaded: {body['lora_path']}"
            return JSONResponse({"error": {"message": said}}, 400)
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type="application/json")
        return JSONResponse(generated(answer.json()["choices"][0], body, scores))

    async def _adapters(self, path: str, request: Request) -> Response:
        answer = await self._client.post(path, json=await request.json())
        if answer.status_code == 200:
            return JSONResponse({"success": True})
        message = answer.json()["error"]["message"]
        return JSONResponse({"success": False, "error_message": message}, 400)


def completion(body: dict[str, Any], scores: bool) -> dict[str, Any]:
    """A ``/generate`` as ``/v1/completions``."""
    params = body["sampling_params"]
    asked = {
        "model": body["lora_path"],
        "prompt": body["input_ids"],
        "max_tokens": params["max_new_tokens"],
        "temperature": params["temperature"],
        "top_k": max(0, params.get("top_k", -1)),
        "logprobs": 0,
        "return_token_ids": True,
        "request_id": body["rid"],
    }
    if scores:
        return asked | {"prompt_logprobs": 0}
    asked |= {"top_p": params["top_p"], "seed": params["sampling_seed"]}
    if "stop_token_ids" in params:
        asked |= {"ignore_eos": True, "stop_token_ids": params["stop_token_ids"]}
    return asked


def generated(choice: dict[str, Any], body: dict[str, Any], scores: bool) -> dict[str, Any]:
    """A choice as the answer of ``/generate``."""
    pairs = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
    meta: dict[str, Any] = {
        "id": body["rid"],
        "finish_reason": {"type": choice["finish_reason"]},
        "output_token_logprobs": [[score, token, None] for score, token in pairs],
    }
    if scores:
        meta["input_token_logprobs"] = [
            [entry and entry[str(token)]["logprob"], token, None]
            for entry, token in zip(choice["prompt_logprobs"], body["input_ids"], strict=True)
        ]
    return {
        "output_ids": choice["token_ids"],
        "prompt_token_ids": choice["prompt_token_ids"],
        "meta_info": meta,
    }


@contextmanager
def sglang_front(url: str) -> Iterator[str]:
    """The address of a front, in a thread."""
    front = Front(url)
    routes = [
        Route("/health", front.health),
        Route("/v1/models", front.models),
        Route("/server_info", front.info),
        Route("/generate", front.generate, methods=["POST"]),
        Route("/load_lora_adapter", front.load, methods=["POST"]),
        Route("/unload_lora_adapter", front.unload, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
