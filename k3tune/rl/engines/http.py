"""One rollout server over HTTP: a call, its deadline, and what went wrong in terms of what to do.

Everything runs in one event loop in a thread of its own, so that callers stay synchronous and
several of their threads may wait at once.
"""

import asyncio
import ipaddress
import json
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx

from k3tune.errors import ConfigError, RolloutError
from k3tune.files import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CONNECT_S = 10.0
# 408 and 429 say so; of 5xx a server may recover
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_BUSY = frozenset({429, 503})
_LONGEST_MESSAGE = 400


@dataclass(frozen=True)
class HttpOptions:
    """How an engine over HTTP behaves.

    Attributes:
        request_timeout_s: for one attempt at one sample, in seconds.
        step_timeout_s: for a whole ``generate``, ``score`` or ``load_adapter``.
        outage_timeout_s: how long no replica may answer anything before the step fails.
        max_attempts: tries of a sample whose answers are unusable. Connection errors, 429 and 503
            do not count: these are tried until a timeout above.
        backoff_s, max_backoff_s: pause after the first failure, doubled up to the second.
        max_concurrency: requests under way at one replica.
        max_adapters: adapters alive at one replica, the live one included.
        token_variable: environment variable with the bearer token; unset sends none.
        progress: show a bar; None shows it on a terminal.

    Raises:
        ConfigError: naming the first field out of range.
    """

    request_timeout_s: float = 600.0
    step_timeout_s: float = 3600.0
    outage_timeout_s: float = 300.0
    max_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_concurrency: int = 64
    max_adapters: int = 3
    token_variable: str = "K3TUNE_API_TOKEN"
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "step_timeout_s", "outage_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected seconds above 0")
        if not 0 < self.backoff_s <= self.max_backoff_s:
            raise ConfigError(
                f"backoff_s is {self.backoff_s!r} and max_backoff_s {self.max_backoff_s!r}, "
                "expected seconds above 0, the first at most the second"
            )
        for name, least in (("max_attempts", 1), ("max_concurrency", 1), ("max_adapters", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected at least {least}")


class Call(NamedTuple):
    """An HTTP call; ``body`` goes as JSON."""

    method: str
    path: str
    body: dict[str, Any] | None = None


class CallFailed(Exception):
    """A call that brought no usable answer.

    Attributes:
        reason: a sentence's part, without the server's address.
        status: of HTTP, or None where no whole answer came.
        again: whether the same call may succeed later.
        away: no whole answer came, or the server said it is busy: not this call's fault.
        wait_s: what the server asked for.
    """

    def __init__(
        self,
        reason: str,
        *,
        status: int | None = None,
        again: bool = True,
        away: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status
        self.again, self.away, self.wait_s = again, away, wait_s


class Server:
    """One server's address and connections. No proxy of the environment is used.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        options: timeouts, the number of connections, where the token is.

    Raises:
        ConfigError: if the address is not usable.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        self.url = checked_url(url)
        self._options = options
        token = os.environ.get(options.token_variable, "").strip()
        _warn_of_plain_http(self.url, bool(token))
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # the deadlines of this module bound whole answers, which httpx's timeouts do not
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            # a connection a call: on a shared one what a server or proxy sent twice is read as the
            # answer of the next call; a call takes seconds, a connection a millisecond
            limits=httpx.Limits(
                max_connections=options.max_concurrency + 8, max_keepalive_connections=0
            ),
            trust_env=False,
            # without TLS there is nothing to verify, and certificates take a while to read
            verify=self.url.startswith("https"),
            follow_redirects=False,
        )

    async def call(self, call: Call, *, timeout_s: float | None = None) -> Any:
        """Make one attempt and return the JSON of a 2xx answer, or its text where it is none.

        Raises:
            CallFailed: for anything else.
        """
        wait_s = self._options.request_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(wait_s):
                response = await self._client.request(call.method, call.path, json=call.body)
        except TimeoutError:
            raise CallFailed(f"{call.path} gave no answer in {wait_s:g} s") from None
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise CallFailed(f"{call.path}: {said}", away=True) from error
        if response.is_success:
            return _content(response, call)
        raise _refusal(response, call)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _content(response: httpx.Response, call: Call) -> Any:
    if "json" not in response.headers.get("content-type", ""):
        return response.text
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"{call.path} answered what is no JSON ({error})") from error


def _refusal(response: httpx.Response, call: Call) -> CallFailed:
    status = response.status_code
    wait_s = None
    try:
        wait_s = max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        # absent, or a date, which no server here sends
        pass
    return CallFailed(
        f"{call.path} answered {status}: {_message(response)}",
        status=status,
        again=status in _RETRIED,
        away=status in _BUSY,
        wait_s=wait_s,
    )


def _message(response: httpx.Response) -> str:
    """What the server says is wrong, whatever form it has."""
    try:
        said = json.loads(response.content)
    except (ValueError, RecursionError):
        said = response.text
    while isinstance(said, dict):
        inner = (said.get(key) for key in ("error", "message", "error_message", "detail"))
        said = next((value for value in inner if value), shown(said))
    text = " ".join(str(said).split()) or "nothing"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def checked_url(url: str) -> str:
    """A server's address without its trailing ``/v1``.

    Raises:
        ConfigError: if it is no http(s) address, or holds a password, which would be logged.
    """
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown(url)} is no address of a server, expected one such as http://127.0.0.1:8000"
        )
    if parts.username or parts.password:
        raise ConfigError(
            f"the address of {parts.hostname} holds a name or password, expected none: put a token "
            "into the environment"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or number."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _warn_of_plain_http(url: str, with_token: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        logger.warning(
            "%s is plain HTTP to another machine: prompts, samples%s are readable on the way; use "
            "https, or a tunnel",
            url,
            " and the bearer token" if with_token else "",
        )


class LoopThread:
    """An event loop in a daemon thread, for callers that are not asynchronous."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to its end and return its result; an interrupt of the caller cancels it.

        Raises:
            RolloutError: if the loop is closed, before or while it runs.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RolloutError("the engine is closed: make a new one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RolloutError("the engine was closed while it worked") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop, and what still runs in it; a second call does nothing."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
