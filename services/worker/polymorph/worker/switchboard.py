"""The one application of the worker's HTTP server: it outlives engines, and sends each new request to the seat of now."""

import asyncio
import json
import math

from polymorph.engine.provenance import naming
from polymorph.events.headers import ELSEWHERE, RETRY
from polymorph.worker.seat import Receive, Scope, Seat, Send

_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})


class Switchboard:
    """Between two requests it may change the seat; a request stays where it began.

    While newcomers are held, they wait for at most `hold_s` seconds, and are then sent away with 503 and Retry-After.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._open = asyncio.Event()
        self._holds = 0
        self.current: Seat | None = None
        self.waiting = 0

    @property
    def held(self) -> bool:
        return self._holds > 0

    @property
    def closed(self) -> bool:
        """Whether newcomers would wait."""
        return not self._open.is_set()

    def hold(self) -> None:
        """Newcomers wait from now on, until each hold was released."""
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        self._holds -= 1
        self._settle()

    def seat(self, seat: Seat | None) -> Seat | None:
        """Newcomers go to `seat` from now on; returns where they went before."""
        before, self.current = self.current, seat
        self._settle()
        return before

    def _settle(self) -> None:
        if self._holds == 0 and self.current is not None:
            self._open.set()
        else:
            self._open.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        seat = await self._seat_for(scope)
        if seat is None:
            await send_away(scope, send, self._hold_s)
            return
        with seat.serving():
            await seat.app(scope, receive, naming(send, seat.revision))

    async def _seat_for(self, scope: Scope) -> Seat | None:
        """Whoever only looks is answered at once: a probe must not wait for an engine that starts."""
        if self._open.is_set() or scope.get("method") in _LOOKS:
            return self.current
        self.waiting += 1
        try:
            async with asyncio.timeout(self._hold_s):
                while self.current is None or self._holds:
                    await self._open.wait()
        except TimeoutError:
            return None
        finally:
            self.waiting -= 1
        return self.current


async def send_away(scope: Scope, send: Send, retry_after_s: float) -> None:
    """503: this worker lives and has no engine at this moment; another may take the request."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013})
        return
    error = {
        "message": "the engine is being restarted; try again",
        "type": "ServiceUnavailableError",
        "code": 503,
    }
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (RETRY, ELSEWHERE),
        (b"retry-after", str(max(1, math.ceil(min(retry_after_s, 30.0)))).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    """The server's own; each seat's application has one of its own, from `Seats.open` to `Seats.stop`."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
