"""The client's side of one request, in ASGI: its body, its leaving, and what is sent back."""

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from polymorph.gateway.domain.refusal import Refusal, too_large

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client left before its request was whole."""


def header(headers: Headers, name: bytes) -> str | None:
    """The first value of a header; ASGI servers give names in lower case."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body, once.

    Raises:
        Refusal: it is larger than `limit` (413).
        ClientGone: the client left.
    """
    announced = header(headers, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def refuse(send: Send, refusal: Refusal, request_id: str) -> None:
    """Answers with an error of ours."""
    body = refusal.body()
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(refusal.retry_after_s)).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Departure:
    """Cancels the request's task when its client leaves, whatever it is waiting for."""

    def __init__(self, receive: Receive) -> None:
        self.left = False
        self._over = False
        self._request = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait(receive))

    def over(self) -> None:
        """From here on the client may leave: it has everything."""
        self._over = True
        self._watch.cancel()

    def forgive(self) -> None:
        """Takes the cancellation back, once it was understood as the client's leaving."""
        if self._request is not None:
            self._request.uncancel()

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over and self._request is not None:
            self.left = True
            self._request.cancel()
