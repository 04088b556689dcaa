"""One connection that never gives up, and the errors that its calls are told as."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js import errors as js_errors

from polymorph.bus.errors import Fatal, Poison, Unavailable
from polymorph.config.settings import NatsSettings

log = logging.getLogger(__name__)

RECONNECT_WAIT_S = 0.1
RETRY_WAIT_S = 0.1
T = TypeVar("T")

NOBODY = (nats.errors.NoRespondersError, js_errors.NoStreamResponseError, js_errors.ServiceUnavailableError)
"""Nothing was done: JetStream is still starting, the stream is missing, or this account may not."""


@contextlib.contextmanager
def told_as_bus_errors(what: str) -> Iterator[None]:
    """Tells the client's errors as the bus's own."""
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise Poison(
            f"{what}: larger than the server's payload limit; put it into the object store"
        ) from error
    except nats.errors.ConnectionClosedError as error:
        raise Fatal(f"{what}: the connection to NATS was closed for good") from error
    except NOBODY as error:
        raise Unavailable(f"{what}: nobody answers; not provisioned, not ready, or not allowed") from error
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise Unavailable(f"{what}: {str(error) or type(error).__name__}") from error


class Cancellation:
    """Raises the cancellation that `asyncio.wait_for`, which the client uses, loses before Python 3.12.

    It returns a result that came in the same turn as the cancellation, and the task runs on as if nobody had asked.
    Cancellations from before do not count: cleaning up after one must be able to call.
    """

    def __init__(self) -> None:
        self._before = _cancellations()

    def heed(self) -> None:
        if _cancellations() > self._before:
            raise asyncio.CancelledError


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Connection:
    """A NATS connection with its JetStream context, the time a call may take, and word of reconnects."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.client = Client()
        self.jetstream: JetStreamContext = self.client.jetstream(timeout=timeout_s)
        self._watchers: list[Callable[[], None]] = []
        self._closing = False
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._refused: asyncio.Future[None] = loop.create_future()

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    async def open(self, settings: NatsSettings, *, name: str, wait_s: float | None) -> None:
        """Connects, however long the server takes to come (at most `wait_s`, where given).

        Raises:
            Fatal: the server refuses the credentials.
            Unavailable: `wait_s` went by.
        """
        opening = asyncio.ensure_future(self._connect(settings, name))
        try:
            await asyncio.wait({opening, self._refused}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._give_up(opening)
            raise
        if opening.done():
            opening.result()
            return
        await self._give_up(opening)
        if self._refused.done():
            raise Fatal(f"{settings.url} refuses user {settings.user!r}: check the credentials")
        raise Unavailable(f"no NATS server answered at {settings.url} within {wait_s} s")

    async def _give_up(self, opening: "asyncio.Future[None]") -> None:
        self._closing = True
        opening.cancel()
        await asyncio.wait({opening}, timeout=self.timeout_s)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.close()

    async def _connect(self, settings: NatsSettings, name: str) -> None:
        options: dict[str, Any] = {}
        if settings.user is not None:
            options["user"] = settings.user
        if settings.password is not None:
            options["password"] = settings.password.get_secret_value()
        if settings.nkey_seed_file is not None:
            options["nkeys_seed"] = str(settings.nkey_seed_file)
        await self.client.connect(
            servers=[settings.url],
            name=name,
            inbox_prefix=settings.inbox_prefix.encode(),
            max_reconnect_attempts=-1,
            # The client annotates whole seconds but sleeps on fractions, which a quick return needs.
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            flush_timeout=self.timeout_s,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_close,
            **options,
        )

    async def _on_error(self, error: Exception) -> None:
        if "authorization" in str(error).lower() and not self._refused.done() and not self.connected:
            self._refused.set_result(None)
        log.debug("nats: %s", error)

    async def _on_disconnect(self) -> None:
        if not self._closing:
            log.warning("nats: the server is away")

    async def _on_reconnect(self) -> None:
        log.info("nats: the server is back")
        self._tell_watchers()

    async def _on_close(self) -> None:
        if not self._closing and not self.lost.done():
            self.lost.set_exception(Fatal("the connection to NATS was closed for good"))
            # Seen by whoever awaits it; without a reader it must not warn when collected.
            self.lost.exception()
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        for tell in list(self._watchers):
            tell()

    def on_reconnect(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Calls `tell` after every reconnect and at the end; returns the call that ends it."""
        self._watchers.append(tell)
        return lambda: self._watchers.remove(tell)

    def check(self) -> None:
        """Raises `Fatal` where the connection is closed for good."""
        if self.client.is_closed:
            raise Fatal("the connection to NATS was closed for good")

    async def until_answered(self, what: str, call: Callable[[float], Awaitable[T]]) -> T:
        """Repeats `call(seconds left)` while nobody answers, which is certain to have done nothing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        cancellation = Cancellation()
        with told_as_bus_errors(what):
            while True:
                try:
                    answer = await call(max(0.05, deadline - loop.time()))
                except NOBODY:
                    if loop.time() + RETRY_WAIT_S >= deadline:
                        raise
                    await asyncio.sleep(RETRY_WAIT_S)
                else:
                    cancellation.heed()
                    return answer

    async def store(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Has JetStream keep a message; returns its sequence. Raises the client's `APIError` where it is refused."""

        async def call(left: float) -> int:
            ack = await self.jetstream.publish(
                subject, body, timeout=left, headers=dict(headers or {}) or None
            )
            return ack.seq

        return await self.until_answered(f"publish {subject}", call)

    async def settle(self, timeout_s: float | None = None) -> None:
        """Returns when the server has taken all that was sent before; at once while it is away.

        Twice, since the client writes its PING past what it still holds back: the first answer can come before the
        server has read a subscription, the second can't.
        """
        for _ in range(2):
            if self.connected:
                # The client annotates whole seconds and takes fractions.
                await self.client.flush(timeout=timeout_s or self.timeout_s)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Sends what is still to be sent where the server is there, and disconnects.

        Not the client's own drain: it waits for messages that nobody will take any more. Never raises: uvloop answers
        a write to a transport that the server closed with RuntimeError, and the client writes while it closes.
        """
        self._closing = True
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError, RuntimeError):
            await self.settle(timeout_s=1)
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError, RuntimeError):
            await self.client.close()
