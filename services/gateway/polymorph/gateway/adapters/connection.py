"""One HTTP/1.1 connection to a worker: the request goes out as bytes, the answer's bytes come back as they arrive."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import cast

import httptools

_HIGH_WATER = 256 * 1024


class UpstreamError(Exception):
    """A worker did not answer as it should."""


class ConnectFailed(UpstreamError):
    """No connection. `refused` where somebody said no, not where nobody said anything."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class ResetEarly(UpstreamError):
    """The connection ended before the answer began."""


class SentBack(UpstreamError):
    """The worker lives, has no engine at this moment, and would rather have another take the request."""


class BrokenOff(UpstreamError):
    """The connection ended in the middle of the answer."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers, names and values as they came."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
    """Carries one exchange at a time; `reusable` says whether another may follow."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._heard = 0.0
        self.exchanges = 0
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: Head | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._complete = False
        self._framed = False
        self._keep_alive = False
        self._error: str | None = None

    # --- what the gateway calls ---

    @property
    def reusable(self) -> bool:
        return self.done and self._keep_alive and not self.closed

    @property
    def done(self) -> bool:
        """Whether every byte of the body was taken."""
        return self._complete and not self._chunks

    @property
    def failed(self) -> bool:
        """Whether the exchange ended for a reason of its own: not since the worker closed a connection that was idle."""
        return self._error is not None

    def silent_for(self, seconds: float) -> bool:
        """Whether an exchange waits for the worker and no byte came for so long."""
        waits = self._waiter is not None and not self._paused
        return waits and asyncio.get_running_loop().time() - self._heard > seconds

    def send(self, head: bytes, body: bytes) -> None:
        """Sends one request."""
        if self._transport is None or self.closed:
            raise ResetEarly("the connection was closed while idle")
        self.exchanges += 1
        self._begin()
        self._heard = asyncio.get_running_loop().time()
        if len(body) < _HIGH_WATER:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def head(self) -> Head:
        """Waits for status and headers."""
        while self._head is None:
            if self.closed or self._error:
                raise ResetEarly(self._error or "the worker closed the connection before it answered")
            await self._wait()
        return self._head

    async def chunk(self) -> bytes | None:
        """All body bytes that came since the last call, at least one; None at the end of the body."""
        while not self._chunks:
            if self._complete:
                return None
            if self._error or self.closed:
                raise BrokenOff(self._error or "the worker closed the connection in the middle of its answer")
            await self._wait()
        taken = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return taken

    def abort(self, reason: str | None = None) -> None:
        """Closes at once: the worker sees its client leave; whoever waits for it is told the reason."""
        self.closed = True
        self._error = self._error or reason
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        if self._complete or not self.exchanges:
            self.abort()  # nobody asked: the next answer would be somebody else's
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._error = f"the worker's answer is not HTTP: {error}"
            self.abort()
        if self._buffered > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._head is not None and not self._framed and exc is None and self._error is None:
            self._complete = True  # a body without a length ends where the connection ends
        self._wake()

    # --- what the parser calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        names = {name.lower() for name, _ in self._headers}
        self._framed = bool(names & {b"content-length", b"transfer-encoding"}) or status in (204, 304)
        self._keep_alive = self._framed and self._parser.should_keep_alive()
        self._head = Head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._head is None:
            self._headers = []  # an interim answer; the real one follows
        else:
            self._complete = True
