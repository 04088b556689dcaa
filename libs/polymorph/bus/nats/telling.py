"""Telemetry over core NATS: at most once, never in the way."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg

from polymorph.bus.nats.connection import Connection, told_as_bus_errors
from polymorph.events.base import Message, Telemetry
from polymorph.events.registry import Undecodable, pack_telemetry, unpack_telemetry

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 1_000_000
MAX_WAIT_S = 0.05


class Telling:
    """Sends and hears telemetry; counts what it drops."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.sent = 0
        self.dropped = 0
        self.undecodable = 0

    async def tell(self, message: Telemetry) -> None:
        client = self._connection.client
        if not client.is_connected or client.pending_data_size > MAX_PENDING_BYTES:
            self.dropped += 1
            return
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await client.publish(message.subject(), pack_telemetry(message))
        except (nats.errors.Error, TimeoutError, OSError):
            self.dropped += 1
        else:
            self.sent += 1

    async def listen(
        self, subject: str, handler: Callable[[str, Message], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        async def on_message(msg: Msg) -> None:
            try:
                message = unpack_telemetry(msg.data)
            except Undecodable as error:
                self.undecodable += 1
                log.debug("%s: dropped: %s", msg.subject, error)
                return
            try:
                await handler(msg.subject, message)
            except Exception:  # the listening loop: one bad message must not end it
                log.exception("%s: the handler failed", msg.subject)

        with told_as_bus_errors(f"listen to {subject}"):
            heard = await self._connection.client.subscribe(subject, cb=on_message)
            await self._connection.settle()

        async def stop() -> None:
            if not self._connection.client.is_closed:
                await heard.unsubscribe()

        return stop
