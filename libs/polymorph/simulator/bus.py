"""A bus with faults around it, and a journal of what came through."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from polymorph.bus import topology
from polymorph.bus.port import (
    Bus,
    Consumption,
    DeadLetter,
    Delivery,
    Gap,
    Handler,
    KeyValue,
    Responder,
    StreamRecord,
)
from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.requests import Request
from polymorph.events.state import DesiredState
from polymorph.simulator.faults import Crashed
from polymorph.simulator.journal import Journal


class Misfortune(Protocol):
    """`Faults`, or `CrashAt`."""

    async def pause(self, point: str) -> None: ...

    def duplicates(self) -> bool: ...

    def drops(self) -> bool: ...


class FaultyBus:
    """A `polymorph.bus.port.Bus`: calls may be late, may be the caller's last, and may have worked all the same."""

    def __init__(self, inner: Bus, faults: Misfortune, journal: Journal) -> None:
        self._inner = inner
        self._faults = faults
        self._journal = journal

    async def publish(self, message: Event | Command) -> int:
        await self._faults.pause("publish before")
        sequence = await self._inner.publish(message)
        if self._faults.duplicates():
            sequence = await self._inner.publish(message)
        if isinstance(message, Event) and message not in self._journal.told:
            self._journal.told.append(message)
        await self._faults.pause("publish after")
        return sequence

    async def tell(self, message: Telemetry) -> None:
        if not self._faults.drops():
            await self._inner.tell(message)

    async def listen(
        self, subject: str, handler: Callable[[str, Message], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        return await self._inner.listen(subject, handler)

    async def consume(self, consumption: Consumption, handler: Handler) -> None:
        deaths: list[Crashed] = []

        async def fragile(delivery: Delivery) -> None:
            try:
                await self._faults.pause("deliver before")
                await handler(delivery)
                if self._faults.duplicates():
                    await handler(delivery)
            except Crashed as death:
                # A dead process acknowledges nothing: to the inner bus it looks cancelled.
                deaths.append(death)
                raise asyncio.CancelledError from death

        await self._inner.consume(consumption, fragile)
        if deaths:
            raise deaths[0]

    async def request(self, request: Request, *, timeout_s: float) -> bytes:
        return await self._inner.request(request, timeout_s=timeout_s)

    def converse(
        self, request: Request, *, first_s: float
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._inner.converse(request, first_s=first_s)

    async def respond(
        self, request_type: type[Request], subject_id: str, responder: Responder, *, group: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        return await self._inner.respond(request_type, subject_id, responder, group=group)

    def events(
        self, *, subjects: str = "polymorph.evt.>", after: str | None = None
    ) -> AsyncIterator[StreamRecord | Gap]:
        return self._inner.events(subjects=subjects, after=after)

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        await self._faults.pause(f"get {bucket}")
        return await self._inner.kv_get(bucket, key)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        await self._faults.pause(f"put {bucket} before")
        return await self._shown(bucket, value, await self._inner.kv_put(bucket, key, value))

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int:
        await self._faults.pause(f"create {bucket} before")
        return await self._shown(bucket, value, await self._inner.kv_create(bucket, key, value))

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        await self._faults.pause(f"update {bucket} before")
        return await self._shown(bucket, value, await self._inner.kv_update(bucket, key, value, revision))

    async def kv_delete(self, bucket: str, key: str) -> None:
        await self._faults.pause(f"delete {bucket} before")
        await self._inner.kv_delete(bucket, key)

    async def kv_keys(self, bucket: str) -> list[str]:
        await self._faults.pause(f"keys {bucket}")
        return await self._inner.kv_keys(bucket)

    def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[KeyValue]:
        return self._inner.kv_watch(bucket, key)

    async def put_object(self, data: bytes, *, store: str = topology.ARTIFACTS) -> str:
        await self._faults.pause("put object")
        return await self._inner.put_object(data, store=store)

    async def get_object(
        self, digest: str, *, store: str = topology.ARTIFACTS, at_most: int | None = None
    ) -> bytes:
        await self._faults.pause("get object")
        return await self._inner.get_object(digest, store=store, at_most=at_most)

    async def dead_letters(self) -> list[DeadLetter]:
        return await self._inner.dead_letters()

    async def retry_dead_letter(self, letter_id: str) -> None:
        await self._inner.retry_dead_letter(letter_id)

    async def drop_dead_letter(self, letter_id: str) -> None:
        await self._inner.drop_dead_letter(letter_id)

    async def ready(self) -> bool:
        return await self._inner.ready()

    async def close(self) -> None:
        await self._inner.close()

    async def _shown(self, bucket: str, value: bytes, revision: int) -> int:
        if bucket == topology.DESIRED:
            self._journal.shown.append(DesiredState.model_validate_json(value))
        await self._faults.pause(f"write {bucket} after")
        return revision
