"""The bus in memory: the same behaviour as on NATS, on any clock, for tests and simulations."""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, Corrupt, NotFound, TooLarge, Unavailable
from polymorph.bus.memory_consumer import MemoryConsumer
from polymorph.bus.memory_world import MemoryResponder, MemoryWorld
from polymorph.bus.pattern import matches
from polymorph.bus.port import Consumption, DeadLetter, Gap, Handler, KeyValue, Responder, StreamRecord
from polymorph.bus.position import Position
from polymorph.bus.waiting import within
from polymorph.config.clock import Clock
from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.envelope import wrap
from polymorph.events.registry import Undecodable, open_envelope, pack_telemetry, unpack_telemetry
from polymorph.events.requests import Request
from polymorph.events.subjects import subject

log = logging.getLogger(__name__)
T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class InMemoryBus:
    """`port.Bus` over a `MemoryWorld` that several buses may share."""

    def __init__(self, source: str, clock: Clock, world: MemoryWorld | None = None) -> None:
        self.world = MemoryWorld() if world is None else world
        self.telemetry_dropped = 0
        self.telemetry_undecodable = 0
        self._source = source
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    # --- messages --------------------------------------------------------------------------------------------------

    async def publish(self, message: Event | Command) -> int:
        where = message.subject()
        stream = topology.stream_of(where)
        envelope = wrap(message, source=self._source, time=self._clock.now())
        return await self._keep(stream, where, envelope.model_dump_json().encode(), envelope.id)

    async def publish_raw(self, where: str, body: bytes, message_id: str) -> int:
        """Keeps bytes as they are, whoever may understand them."""
        return await self._keep(topology.stream_of(where), where, body, message_id)

    async def _keep(self, stream: str, where: str, body: bytes, message_id: str) -> int:
        await self._round_trip()
        sequence = self.world.streams[stream].append(where, body, self._clock.now(), message_id)
        self.world.tell_change()
        return sequence

    async def tell(self, message: Telemetry) -> None:
        self.tell_raw(message.subject(), pack_telemetry(message))

    def tell_raw(self, where: str, body: bytes) -> None:
        """Hands telemetry bytes, whatever they are, to who listens."""
        if not self.world.available:
            self.telemetry_dropped += 1
            return
        for pattern, hear in list(self.world.listeners):
            if matches(pattern, where):
                hear(where, body)

    async def listen(
        self, subject: str, handler: Callable[[str, Message], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        listener = (subject, lambda where, body: heard.put_nowait((where, body)))

        async def hear_all() -> None:
            while True:
                where, body = await heard.get()
                await self._hear(where, body, handler)

        self.world.listeners.append(listener)
        task = self._spawn(hear_all())

        async def stop() -> None:
            if listener in self.world.listeners:
                self.world.listeners.remove(listener)
            task.cancel()

        return stop

    async def _hear(
        self, where: str, body: bytes, handler: Callable[[str, Message], Awaitable[None]]
    ) -> None:
        try:
            message = unpack_telemetry(body)
        except Undecodable as error:
            self.telemetry_undecodable += 1
            log.debug("%s: dropped: %s", where, error)
            return
        try:
            await handler(where, message)
        except Exception:  # the listening loop: one bad message must not end it
            log.exception("%s: the handler failed", where)

    async def consume(self, consumption: Consumption, handler: Handler) -> None:
        await MemoryConsumer(self.world, self._clock, consumption, handler).run()

    async def events(
        self, *, subjects: str = topology.EVENTS_SUBJECTS, after: str | None = None
    ) -> AsyncIterator[StreamRecord | Gap]:
        given = None if after is None else Position.parse(after)
        extent = self.world.streams[topology.EVENTS_STREAM].extent
        place = Position(extent.epoch, extent.last) if given is None else given
        while True:
            changed = self.world.changed
            stream = self.world.streams[topology.EVENTS_STREAM]
            seen, gone = stream.extent.resume(place)
            if gone:
                yield Gap(after=str(place), resumes_at=str(Position(seen.epoch, seen.sequence + 1)))
            place = seen
            for kept in list(stream.after(place.sequence, subjects)) if self.world.available else ():
                place = Position(stream.epoch, kept.sequence)
                yield StreamRecord(str(place), kept.subject, open_envelope(kept.body))
            await changed.wait()

    # --- questions -------------------------------------------------------------------------------------------------

    async def request(self, request: Request, *, timeout_s: float) -> bytes:
        async with self.converse(request, first_s=timeout_s) as answers:
            return await anext(answers)

    @contextlib.asynccontextmanager
    async def converse(self, request: Request, *, first_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        where = request.subject()
        asked = self.world.responders_for(where) if self.world.available else []
        if not asked:
            raise Unavailable(f"ask {where}: nobody answers")
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        body = request.model_dump_json().encode()
        for responder in asked:
            self._spawn(_answer(responder, where, body, answers))
        try:
            first = await within(self._clock, answers.get(), first_s)
        except TimeoutError:
            raise Unavailable(f"ask {where}: no answer within {first_s} s") from None
        yield _bodies(first, answers)

    async def respond(
        self, request_type: type[Request], subject_id: str, responder: Responder, *, group: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        where = subject("req", request_type.DOMAIN, request_type.NAME, request_type.VERSION, subject_id)
        entry = MemoryResponder(where, group, responder)
        self.world.responders.append(entry)

        async def stop() -> None:
            if entry in self.world.responders:
                self.world.responders.remove(entry)

        return stop

    # --- key-value -------------------------------------------------------------------------------------------------

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        await self._round_trip()
        entry = self.world.bucket(bucket).entries(self._clock.monotonic()).get(topology.checked_key(key))
        if entry is None or entry.value is None:
            raise NotFound(f"bucket {bucket} has no key {key!r}")
        return entry

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._write(bucket, key, value, None)

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int:
        await self._round_trip()
        held = self.world.bucket(bucket).entries(self._clock.monotonic()).get(key)
        if held is not None and held.value is not None:
            raise Conflict(f"{bucket}/{key} exists at revision {held.revision}")
        return await self._write(bucket, key, value, 0 if held is None else held.revision)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        return await self._write(bucket, key, value, revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        await self._write(bucket, key, None, None)

    async def _write(self, bucket: str, key: str, value: bytes | None, expected: int | None) -> int:
        await self._round_trip()
        now = self._clock.monotonic()
        return self.world.bucket(bucket).write(topology.checked_key(key), value, now, expected)

    async def kv_keys(self, bucket: str) -> list[str]:
        await self._round_trip()
        entries = self.world.bucket(bucket).entries(self._clock.monotonic())
        return sorted(key for key, entry in entries.items() if entry.value is not None)

    async def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[KeyValue]:
        held = self.world.buckets[bucket]
        news = held.watch(key, self._clock.monotonic())
        try:
            while True:
                expiry = held.next_expiry()
                left = None if expiry is None else expiry - self._clock.monotonic()
                try:
                    yield (
                        news.get_nowait() if not news.empty() else await within(self._clock, news.get(), left)
                    )
                except TimeoutError:
                    held.expire(self._clock.monotonic())
        finally:
            held.unwatch(news)

    # --- objects and dead letters ----------------------------------------------------------------------------------

    async def put_object(self, data: bytes, *, store: str = topology.ARTIFACTS) -> str:
        await self._round_trip()
        digest = hashlib.sha256(data).hexdigest()
        self.world.objects[store][digest] = data
        return digest

    async def get_object(
        self, digest: str, *, store: str = topology.ARTIFACTS, at_most: int | None = None
    ) -> bytes:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest!r} is no object's name: a sha256 in 64 lower-case hex digits")
        await self._round_trip()
        data = self.world.objects[store].get(digest)
        if data is None:
            raise NotFound(f"no object {digest}")
        if at_most is not None and len(data) > at_most:
            raise TooLarge(f"object {digest} has {len(data)} bytes, {at_most} are taken")
        if hashlib.sha256(data).hexdigest() != digest:
            raise Corrupt(f"object {digest}: its {len(data)} bytes have another digest")
        return data

    async def dead_letters(self) -> list[DeadLetter]:
        await self._round_trip()
        return list(self.world.letters.values())

    async def retry_dead_letter(self, letter_id: str) -> None:
        letter = await self._letter(letter_id)
        await self.publish_raw(letter.subject, letter.body, f"retry.{letter_id}")
        self.world.letters.pop(letter_id, None)

    async def drop_dead_letter(self, letter_id: str) -> None:
        await self._letter(letter_id)
        self.world.letters.pop(letter_id, None)

    async def _letter(self, letter_id: str) -> DeadLetter:
        await self._round_trip()
        try:
            return self.world.letters[letter_id]
        except KeyError:
            raise NotFound(f"no dead letter {letter_id!r}") from None

    # --- being there -----------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        return self.world.available

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _round_trip(self) -> None:
        """Lets others run, as a server's answer would, and fails where the server is away."""
        await asyncio.sleep(0)
        self.world.check()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _answer(responder: MemoryResponder, where: str, body: bytes, answers: asyncio.Queue[bytes]) -> None:
    async def reply(answer: bytes) -> None:
        answers.put_nowait(answer)

    try:
        await responder.answer(body, reply)
    except Exception:  # the responder loop: one bad question must not end the answering
        log.exception("%s: no answer", where)


async def _bodies(first: bytes, answers: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    yield first
    while True:
        yield await answers.get()
