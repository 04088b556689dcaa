"""The port: what a service needs of a bus. Two implementations, one behaviour suite (tests/contract)."""

import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from polymorph.bus import topology
from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.envelope import Envelope
from polymorph.events.requests import Request


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as a handler gets it."""

    envelope: Envelope
    message: Message
    attempt: int
    stream_sequence: int


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One kept event as a watcher sees it; `position` is `<epoch>-<sequence>`."""

    position: str
    subject: str
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of the stream that was purged before the watcher came; it goes on at `resumes_at`."""

    after: str
    resumes_at: str


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A value with the revision that a compare-and-set names. `value` is None where the key was deleted."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Consumption:
    """How a durable consumer treats its messages. Times in seconds."""

    durable: str
    subject: str
    ack_wait_s: float = 30.0
    max_attempts: int = 5
    backoff_s: tuple[float, ...] = (1.0, 5.0, 30.0)
    max_in_flight: int = 1


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that no handler could take, with the reason."""

    letter_id: str
    subject: str
    durable: str
    reason: str
    attempts: int
    at: dt.datetime
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Delivery], Awaitable[None]]
Responder = Callable[[bytes, Callable[[bytes], Awaitable[None]]], Awaitable[None]]


class Bus(Protocol):
    """Publish, consume, ask, remember. Every method raises `Unavailable` where the server does not answer in time."""

    async def publish(self, message: Event | Command) -> int:
        """Keeps `message` under its deterministic id; returns its stream sequence. Idempotent by that id."""
        ...

    async def tell(self, message: Telemetry) -> None:
        """Sends telemetry, at most once; never waits for an acknowledgement and never raises for a lost server."""
        ...

    async def listen(
        self, subject: str, handler: Callable[[str, Message], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """Core subscription to a telemetry wildcard; returns the call that ends it. Undecodable messages are counted
        and dropped.
        """
        ...

    async def consume(self, consumption: Consumption, handler: Handler) -> None:
        """Runs until cancelled: pulls, calls `handler`, acknowledges.

        While a handler runs, progress is reported so that the message is not redelivered. `Retryable` redelivers after
        the next backoff; `Poison`, undecodable bodies and the last attempt go to the dead letters.
        """
        ...

    async def request(self, request: Request, *, timeout_s: float) -> bytes:
        """The first answer. Raises `Unavailable` where nobody answers."""
        ...

    def converse(
        self, request: Request, *, first_s: float
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Asks and yields every answer on the same reply subject. Raises `Unavailable` where the first answer does not
        come within `first_s`; later pauses are the caller's to judge.
        """
        ...

    async def respond(
        self, request_type: type[Request], subject_id: str, responder: Responder, *, group: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        """Answers requests (`subject_id` may be "*"); `responder(body, reply)` may reply several times."""
        ...

    def events(
        self, *, subjects: str = "polymorph.evt.>", after: str | None = None
    ) -> AsyncIterator[StreamRecord | Gap]:
        """Kept events from a position on (None: only new ones; "0-0": from the first), then live, surviving restarts."""
        ...

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        """Raises `NotFound`."""
        ...

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int: ...

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int:
        """Raises `Conflict` where the key exists."""
        ...

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        """Compare-and-set. Raises `Conflict`."""
        ...

    async def kv_delete(self, bucket: str, key: str) -> None: ...

    async def kv_keys(self, bucket: str) -> list[str]: ...

    def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[KeyValue]:
        """The current values, then every change; made anew after a server restart (under 2 s) and re-listed every 30 s.

        A value may be told twice. Expiry by TTL is told by the re-list as a deletion, at the latest.
        """
        ...

    async def put_object(self, data: bytes, *, store: str = topology.ARTIFACTS) -> str:
        """Keeps `data` in an object store under its sha256 (hex), which it returns. Idempotent."""
        ...

    async def get_object(
        self, digest: str, *, store: str = topology.ARTIFACTS, at_most: int | None = None
    ) -> bytes:
        """Raises `NotFound`, `TooLarge` where there are more than `at_most` bytes (by what the store says of them, before
        any is read), or `Corrupt` where they do not have that digest.
        """
        ...

    async def dead_letters(self) -> list[DeadLetter]: ...

    async def retry_dead_letter(self, letter_id: str) -> None:
        """Publishes the message anew and drops the letter."""
        ...

    async def drop_dead_letter(self, letter_id: str) -> None: ...

    async def ready(self) -> bool:
        """A JetStream round trip, not a guess."""
        ...

    async def close(self) -> None:
        """Drains and disconnects."""
        ...
