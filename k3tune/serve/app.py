"""The server as an ASGI application: its routes, who may call them, and how errors look."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from k3tune.errors import K3TuneError
from k3tune.serve import chat, completions
from k3tune.serve.completions import Service
from k3tune.serve.events import ClientGone, send_events, unless_gone
from k3tune.serve.fields import Fields, parse_body
from k3tune.serve.limits import Limits, Refused

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response | None]]
_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
}


def make_app(service: Service, limits: Limits, token: str | None) -> Starlette:
    """The application; its lifespan starts and stops the worker.

    Args:
        service: what it serves.
        limits: of requests.
        token: bearer token that every call but ``/health`` must have; None asks for none.
    """

    def route(path: str, handler: Handler, method: str, *, open_to_all: bool = False) -> Route:
        endpoint = _Endpoint(service, handler, limits, None if open_to_all else token)
        return Route(path, endpoint, methods=[method])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.worker.stop)

    return Starlette(
        routes=[
            route("/health", _health, "GET", open_to_all=True),
            route("/version", _version, "GET"),
            route("/v1/models", _models, "GET"),
            route("/v1/completions", _complete, "POST"),
            route("/v1/chat/completions", _chat, "POST"),
            route("/v1/load_lora_adapter", _load, "POST"),
            route("/v1/unload_lora_adapter", _unload, "POST"),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


class _Endpoint:
    """One route: checks the token, runs the handler, turns what is wrong into an answer."""

    def __init__(
        self, service: Service, handler: Handler, limits: Limits, token: str | None
    ) -> None:
        self._service, self._handler, self._limits = service, handler, limits
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _LimitedRequest(scope, receive, send, self._limits)
        try:
            self._check_token(request)
            response = await self._handler(self._service, request)
        except Refused as refused:
            response = _error(refused.status, refused.sentence, refused.retry_after_s)
        except K3TuneError as error:
            response = _error(400, str(error))
        except (ClientGone, ClientDisconnect):
            return
        except Exception:
            logger.exception("%s failed", scope["path"])
            response = _error(500, "the server failed: see its log")
        if response is not None:
            await response(scope, receive, send)

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise Refused(401, "expected the header Authorization: Bearer with the server's token")


class _LimitedRequest(Request):
    """A request whose body is read within the limits."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        super().__init__(scope, receive, send)
        self._limits = limits
        # Starlette keeps these private, and a streamed answer needs both
        self.receiving, self.sending = receive, send

    async def fields(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            Refused: 413 if it is too large, 408 if it does not arrive, 400 if it is no object.
        """
        most, limit_s = self._limits.max_body_bytes, self._limits.body_timeout_s
        content = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in self.stream():
                    content += chunk
                    if len(content) > most:
                        raise Refused(413, f"the body is longer than {most} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {limit_s:g} s") from None
        return parse_body(bytes(content))


async def _health(service: Service, _: Request) -> Response:
    if not service.worker.is_well:
        raise Refused(503, "the worker is stuck: see the server's log")
    return PlainTextResponse("")


async def _version(service: Service, _: Request) -> Response:
    return JSONResponse(service.numerics)


async def _models(service: Service, _: Request) -> Response:
    registry = service.registry
    base: dict[str, Any] = {"root": registry.base, "parent": None}
    base["max_model_len"] = service.model.limits.max_model_len
    cards = {registry.base: base}
    for name, folder in registry:
        cards[name] = {"root": str(folder), "parent": registry.base}
    created = int(time.time())
    data = [
        {"id": name, "object": "model", "created": created, "owned_by": "k3tune", **card}
        for name, card in cards.items()
    ]
    return JSONResponse({"object": "list", "data": data})


async def _complete(service: Service, request: Request) -> Response | None:
    assert isinstance(request, _LimitedRequest), f"{type(request)=}"
    # in a thread: encoding megabytes of text takes its time
    body = await request.fields()
    completion = await asyncio.to_thread(completions.read_completion, service, body)
    if completion.request.stream:
        events = completions.stream(service, completion)
        await send_events(events, request.receiving, request.sending)
        return None
    answer = completions.complete(service, completion)
    return _json(await unless_gone(request.receiving, answer))


async def _chat(service: Service, request: Request) -> Response | None:
    assert isinstance(request, _LimitedRequest), f"{type(request)=}"
    asked = await asyncio.to_thread(chat.read_chat, service, await request.fields())
    if asked.request.stream:
        events = chat.stream(service, asked)
        await send_events(events, request.receiving, request.sending)
        return None
    return _json(await unless_gone(request.receiving, chat.complete(service, asked)))


async def _load(service: Service, request: Request) -> Response:
    assert isinstance(request, _LimitedRequest), f"{type(request)=}"
    fields = Fields(await request.fields())
    name, path = fields.text("lora_name", longest=256), fields.text("lora_path")
    # a new path under an old name would be served beside what was cached of the old one
    fields.finish({"load_inplace": (False,), "is_3d_lora_weight": (False,)}, frozenset())
    if name is None or path is None:
        raise Refused(400, "expected both lora_name and lora_path")
    await service.registry.load(name, path)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload(service: Service, request: Request) -> Response:
    assert isinstance(request, _LimitedRequest), f"{type(request)=}"
    fields = Fields(await request.fields())
    name = fields.text("lora_name", longest=256)
    fields.finish({"lora_int_id": ()}, frozenset())
    if name is None:
        raise Refused(400, "expected lora_name")
    service.registry.unload(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _json(answer: dict[str, Any]) -> Response:
    # lone surrogates, which a request may hold escaped, have no UTF-8
    content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, media_type="application/json")


def _error(status: int, sentence: str, retry_after_s: int | None = None) -> Response:
    """An error in the form of the API."""
    kind = _KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    body = {"error": {"message": sentence, "type": kind, "param": None, "code": status}}
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    content = json.dumps(body, ensure_ascii=True).encode()
    return Response(content, status, headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException), f"{type(error)=}"
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
