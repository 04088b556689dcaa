"""The bus on NATS: each concern in a module of its own, this class joins them to the port."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.nats.asking import Answering, Asking
from polymorph.bus.nats.connection import Connection
from polymorph.bus.nats.consuming import Consumer
from polymorph.bus.nats.keyvalue import Buckets
from polymorph.bus.nats.letters import DeadLetters
from polymorph.bus.nats.objects import Objects
from polymorph.bus.nats.replay import Replay
from polymorph.bus.nats.stored import last_stored
from polymorph.bus.nats.telling import Telling
from polymorph.bus.nats.tracing import traced
from polymorph.bus.nats.watch import Watch
from polymorph.bus.port import Consumption, DeadLetter, Gap, Handler, KeyValue, Responder, StreamRecord
from polymorph.bus.position import Position
from polymorph.config.clock import Clock
from polymorph.config.settings import NatsSettings
from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.envelope import CONTENT_TYPE, wrap
from polymorph.events.requests import Request

TIMEOUT_S = 5.0


class NatsBus:
    """`port.Bus` over one NATS connection. Safe to share in one event loop."""

    def __init__(self, connection: Connection, source: str, clock: Clock) -> None:
        self.connection = connection
        self._source = source
        self._clock = clock
        self._buckets = Buckets(connection)
        self._objects = {store: Objects(connection, store) for store in topology.STORES}
        self._letters = DeadLetters(connection)
        self._asking = Asking(connection)
        self._telling = Telling(connection)

    @classmethod
    async def connect(
        cls,
        settings: NatsSettings,
        source: str,
        clock: Clock,
        *,
        timeout_s: float = TIMEOUT_S,
        wait_s: float | None = None,
    ) -> Self:
        """Connects as `source`; waits for the server as long as it takes, or `wait_s`. A call takes `timeout_s` at most.

        Raises:
            Fatal: the server refuses the credentials.
            Unavailable: no server within `wait_s`.
        """
        connection = Connection(timeout_s)
        await connection.open(settings, name=source, wait_s=wait_s)
        return cls(connection, source, clock)

    @property
    def connected(self) -> bool:
        return self.connection.connected

    @property
    def telemetry_dropped(self) -> int:
        """Telemetry that was not sent since the server was away or slow."""
        return self._telling.dropped

    @property
    def telemetry_undecodable(self) -> int:
        """Telemetry that was received and not understood."""
        return self._telling.undecodable

    async def lost(self) -> None:
        """Waits until the connection is closed for good by anything but `close`, and raises `Fatal` then."""
        await self.connection.lost

    async def publish(self, message: Event | Command) -> int:
        where = message.subject()
        topology.stream_of(where)
        envelope = wrap(message, source=self._source, time=self._clock.now())
        headers = traced({"Nats-Msg-Id": envelope.id, "Content-Type": CONTENT_TYPE})
        return await self.connection.store(where, envelope.model_dump_json().encode(), headers)

    async def tell(self, message: Telemetry) -> None:
        await self._telling.tell(message)

    async def listen(
        self, subject: str, handler: Callable[[str, Message], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        return await self._telling.listen(subject, handler)

    async def consume(self, consumption: Consumption, handler: Handler) -> None:
        await Consumer(self.connection, self._letters, consumption, handler).run()

    async def request(self, request: Request, *, timeout_s: float) -> bytes:
        return await self._asking.request(request, timeout_s)

    def converse(
        self, request: Request, *, first_s: float
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._asking.converse(request, first_s)

    async def respond(
        self, request_type: type[Request], subject_id: str, responder: Responder, *, group: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        return await Answering(self.connection, responder).start(request_type, subject_id, group)

    def events(
        self, *, subjects: str = topology.EVENTS_SUBJECTS, after: str | None = None
    ) -> AsyncIterator[StreamRecord | Gap]:
        place = None if after is None else Position.parse(after)
        return Replay(self.connection, subjects, place).records()

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        return await self._buckets.get(bucket, key)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._buckets.put(bucket, key, value)

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int:
        return await self._buckets.create(bucket, key, value)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        return await self._buckets.update(bucket, key, value, revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        await self._buckets.delete(bucket, key)

    async def kv_keys(self, bucket: str) -> list[str]:
        entries = await self._buckets.entries(bucket)
        return sorted(entry.key for entry in entries.values() if entry.value is not None)

    def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[KeyValue]:
        return Watch(self.connection, self._buckets, bucket, key).values()

    async def put_object(self, data: bytes, *, store: str = topology.ARTIFACTS) -> str:
        return await self._objects[store].put(data)

    async def get_object(
        self, digest: str, *, store: str = topology.ARTIFACTS, at_most: int | None = None
    ) -> bytes:
        return await self._objects[store].get(digest, at_most=at_most)

    async def dead_letters(self) -> list[DeadLetter]:
        return await self._letters.all()

    async def retry_dead_letter(self, letter_id: str) -> None:
        await self._letters.retry(letter_id)

    async def drop_dead_letter(self, letter_id: str) -> None:
        await self._letters.drop(letter_id)

    async def ready(self) -> bool:
        """Reads the event stream or the desired state, whichever this account may."""
        if not self.connection.connected:
            return False
        desired = topology.bucket_stream(topology.DESIRED), topology.key_subject(topology.DESIRED, "ready")
        for stream, subject in (desired, (topology.EVENTS_STREAM, "polymorph.evt.ready")):
            try:
                await last_stored(self.connection, stream, subject)
            except BusError:
                continue
            return True
        return False

    async def close(self) -> None:
        await self.connection.close()
