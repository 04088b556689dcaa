"""Following the event stream from a position on, by batches that leave no state on the server.

Each batch is read before the stream's extent, so that a purge between the two shows as a gap and never as silence.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

from nats.aio.msg import Msg
from nats.js import api
from nats.js import errors as js_errors

from polymorph.bus import topology
from polymorph.bus.errors import Unavailable
from polymorph.bus.nats.connection import RETRY_WAIT_S, Connection, told_as_bus_errors
from polymorph.bus.nats.stored import Stored, read_batch
from polymorph.bus.port import Gap, StreamRecord
from polymorph.bus.position import Extent, Position
from polymorph.events.registry import Undecodable, open_envelope

log = logging.getLogger(__name__)

IDLE_LOOK_S = 5.0
_NO_JETSTREAM_HERE = 10039


class Replay:
    """One reader of the event stream."""

    def __init__(self, connection: Connection, subjects: str, after: Position | None) -> None:
        self._connection = connection
        self._subjects = subjects
        self._after = after
        self._woken = asyncio.Event()
        self._elsewhere = False

    async def records(self) -> AsyncIterator[StreamRecord | Gap]:
        """Kept events, then live ones, until the consumer of the iterator ends it."""
        repeated = self._subjects.replace("polymorph.evt", topology.KEPT_EVENTS, 1)
        with told_as_bus_errors("events"):
            live = await self._connection.client.subscribe(repeated, cb=self._on_kept)
        forget = self._connection.on_reconnect(self._woken.set)
        try:
            while True:
                self._connection.check()
                self._woken.clear()
                try:
                    told = await self._step()
                except Unavailable as error:
                    log.debug("events: %s", error)
                    await asyncio.sleep(RETRY_WAIT_S)
                    continue
                for record in told:
                    yield record
                if not told:
                    await self._wait()
        finally:
            forget()
            if not self._connection.client.is_closed:
                await live.unsubscribe()

    async def _on_kept(self, msg: Msg) -> None:
        del msg
        self._woken.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(IDLE_LOOK_S):
                await self._woken.wait()
        except TimeoutError:
            log.debug("events: nothing new")

    async def _step(self) -> list[StreamRecord | Gap]:
        if self._after is None:
            extent = await self._extent()
            self._after = Position(extent.epoch, extent.last)
        after = self._after
        batch = await read_batch(
            self._connection, topology.EVENTS_STREAM, self._subjects, first=after.sequence + 1
        )
        extent = await self._extent()
        place, gone = extent.resume(after)
        if gone and batch and after.epoch == extent.epoch and batch[0].sequence == after.sequence + 1:
            gone = False  # purged just after it was read
        if gone:
            self._after = place
            return [Gap(after=str(after), resumes_at=str(Position(place.epoch, place.sequence + 1)))]
        told = [self._record(extent, stored) for stored in batch]
        self._after = Position(extent.epoch, batch[-1].sequence if batch else place.sequence)
        return [record for record in told if record is not None]

    def _record(self, extent: Extent, stored: Stored) -> StreamRecord | None:
        try:
            envelope = open_envelope(stored.data)
        except Undecodable as error:
            log.warning("events: %s at %s is left out: %s", stored.subject, stored.sequence, error)
            return None
        return StreamRecord(str(Position(extent.epoch, stored.sequence)), stored.subject, envelope)

    async def _extent(self) -> Extent:
        info = await self._connection.until_answered("events", self._describe)
        epoch = 0 if info.created is None else int(info.created.timestamp() * 1000)
        # A stream that never held anything says first 0; the next message will be 1.
        return Extent(epoch, max(info.state.first_seq, 1), info.state.last_seq)

    async def _describe(self, left: float) -> api.StreamInfo:
        if not self._elsewhere:
            try:
                return await self._connection.jetstream.stream_info(topology.EVENTS_STREAM)
            except js_errors.ServiceUnavailableError as error:
                if error.err_code != _NO_JETSTREAM_HERE:
                    raise
                self._elsewhere = True
        answer = await self._connection.client.request(topology.EVENTS_DESCRIPTION, timeout=left)
        described = json.loads(answer.data)
        if "error" in described:
            raise js_errors.APIError.from_error(described["error"])
        info: api.StreamInfo = api.StreamInfo.from_response(described)
        return info
