"""The worker's entry among the live workers: put anew every two seconds, gone by itself when we are."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.events.state import WorkerRecord
from polymorph.worker.tries import again_and_again

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0


class Registry:
    """Keeps `record()` in the bucket of workers."""

    def __init__(self, record: Callable[[], WorkerRecord], clock: Clock) -> None:
        self._record = record
        self._clock = clock
        self._news = asyncio.Event()

    def news(self) -> None:
        """The record says something else now, which cannot wait for the next heartbeat."""
        self._news.set()

    async def keep(self, bus: Bus) -> None:
        """Runs until cancelled."""
        await again_and_again("the entry in the registry", lambda: self._beat(bus), self._clock, 0.0)

    async def _beat(self, bus: Bus) -> None:
        self._news.clear()
        await self.put(bus)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()

    async def put(self, bus: Bus) -> None:
        record = self._record()
        try:
            await bus.kv_put(topology.WORKERS, record.worker_id, record.model_dump_json().encode())
        except BusError as error:
            _log.info("not registered: %s", error)

    async def remove(self, bus: Bus) -> None:
        with contextlib.suppress(BusError):
            await bus.kv_delete(topology.WORKERS, self._record().worker_id)
