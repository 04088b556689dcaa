"""GET /v1/events: the kept facts as they happen, and from a position on."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from polymorph.bus.errors import BusError, Unavailable
from polymorph.bus.port import Bus, Gap, StreamRecord
from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.link import Link
from polymorph.gateway.domain.event_text import (
    AWAY,
    HEARTBEAT,
    HELLO,
    gap_event,
    is_filter,
    is_position,
    record_event,
)
from polymorph.gateway.domain.refusal import bad_request, unavailable

_AGAIN_S = 1.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Watching:
    """One endpoint for all watchers; `stopping` ends their streams, so that they never hold up a shutdown."""

    def __init__(self, link: Link, heartbeat_s: float, stopping: asyncio.Event) -> None:
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._stopping = stopping

    async def serve(self, request: Request) -> Response:
        subjects = request.query_params.get("subjects") or "polymorph.evt.>"
        if not is_filter(subjects):
            raise bad_request(
                f"subjects is {subjects!r}: use polymorph.evt.> or a part of it, such as polymorph.evt.promotion.>",
                param="subjects",
            )
        after = _position(request)
        if self._link.bus is None:
            raise unavailable("The event log is away.")
        stream = self._stream(subjects, after)
        return StreamingResponse(stream, media_type="text/event-stream", headers=_HEADERS)

    async def _stream(self, subjects: str, after: str | None) -> AsyncGenerator[bytes, None]:
        metrics.EVENT_WATCHERS.inc()
        try:
            yield HELLO
            while not self._stopping.is_set():
                try:
                    bus = self._present()
                    async for record in self._paced(bus.events(subjects=subjects, after=after)):
                        if isinstance(record, StreamRecord):
                            after = record.position
                        yield _text(record)
                except BusError:
                    yield AWAY
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        await self._stopping.wait()
        finally:
            metrics.EVENT_WATCHERS.dec()

    def _present(self) -> Bus:
        """The bus of now: another one after a connection was closed for good."""
        if (bus := self._link.bus) is None:
            raise Unavailable("no connection to the bus")
        return bus

    async def _paced(
        self, records: AsyncIterator[StreamRecord | Gap]
    ) -> AsyncGenerator[StreamRecord | Gap | None, None]:
        """The records, and None where nothing came for a heartbeat; ends at shutdown."""
        stop = asyncio.ensure_future(self._stopping.wait())
        coming = asyncio.ensure_future(anext(records, None))
        try:
            while not stop.done():
                await asyncio.wait(
                    {stop, coming}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    if not stop.done():
                        yield None
                    continue
                record = coming.result()
                if record is None:
                    return
                yield record
                coming = asyncio.ensure_future(anext(records, None))
        finally:
            stop.cancel()
            coming.cancel()
            await asyncio.gather(stop, coming, return_exceptions=True)
            if isinstance(records, AsyncGenerator):
                await records.aclose()


def _position(request: Request) -> str | None:
    """Where the watcher wants to go on: its header, else its query; None for what is new alone.

    Raises:
        Refusal: that is no position (400).
    """
    for name, given in (
        ("Last-Event-ID", request.headers.get("last-event-id")),
        ("since", request.query_params.get("since")),
    ):
        if not given:
            continue
        if not is_position(given):
            raise bad_request(
                f"{name} is {given!r}: use <epoch>-<sequence> in digits, each below 2^63, or 0-0 for all",
                param=name,
            )
        return given
    return None


def _text(record: StreamRecord | Gap | None) -> bytes:
    if record is None:
        return HEARTBEAT
    return gap_event(record) if isinstance(record, Gap) else record_event(record)
