"""Answers that are sent as they come, and clients that leave before the end."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Send

from k3tune.errors import K3TuneError
from k3tune.serve.limits import Refused

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed its connection: nobody waits for the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and stop it when the client leaves.

    Args:
        receive: of a request whose body was read.
        work: to do.

    Raises:
        ClientGone: if it left first.
    """
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        # what the work has to tidy up is done before this returns
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(
    events: AsyncGenerator[dict[str, Any], None], receive: Receive, send: Send
) -> None:
    """Send server-sent events, and ``[DONE]`` after the last.

    The status goes out with the first event: what fails before is still an error of its own.

    Raises:
        ClientGone: if the client left.
        Refused, K3TuneError: from before the first event.
    """

    async def pump() -> None:
        started = False
        try:
            async for event in events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    started = True
                await send(_data(json.dumps(event, ensure_ascii=False)))
        except (Refused, K3TuneError) as error:
            if not started:
                raise
            await send(_data(json.dumps({"error": {"message": str(error)}})))
        await send(_data("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    try:
        await unless_gone(receive, pump())
    finally:
        await events.aclose()


def _data(text: str) -> dict[str, Any]:
    body = f"data: {text}\n\n".encode("utf-8", "replace")
    return {"type": "http.response.body", "body": body, "more_body": True}
