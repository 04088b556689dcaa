"""Telemetry out of the request's way: a bounded queue that one task empties onto the bus."""

import asyncio

from polymorph.events.base import Telemetry
from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.link import Link

_ROOM = 10_000


class Telegraph:
    """Drops, and counts what it drops, where nobody takes the telemetry away."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: asyncio.Queue[Telemetry] = asyncio.Queue(_ROOM)

    def tell(self, message: Telemetry) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            metrics.TELEMETRY_DROPPED.inc()

    async def run(self) -> None:
        while True:
            bus = await self._link.wait()
            await bus.tell(await self._queue.get())

    async def flush(self) -> None:
        """Sends what is left, at shutdown."""
        bus = self._link.bus
        while bus is not None and not self._queue.empty():
            await bus.tell(self._queue.get_nowait())
